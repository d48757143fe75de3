# SPDX-License-Identifier: Apache-2.0
"""The papers' experiments run, are kept, and say what they measured."""

from pathlib import Path

import numpy as np
import pytest

from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.workload.generate import tool_agent
from mooncake_jax.workload.trace import TraceRow
from scripts import reproduce
from scripts.config import load
from scripts.reproduction.hits import optimal_share
from scripts.reproduction.loads import loads
from scripts.reproduction.replicas import Replicas
from scripts.reproduction.runs import FOLDER
from scripts.reproduction.table import EXPERIMENTS
from scripts.sweeps.grid import Sweep
from scripts.trace_hits import exact

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = [
  path
  for path in sorted((ROOT / FOLDER).glob('*.gin'))
  if 'grid.Sweep.run' in path.read_text()
]


@pytest.mark.parametrize('path', SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_names_a_run_and_is_used(path):
  sweep, _ = load(path, (), Sweep)
  assert (ROOT / sweep.run).is_file()
  modules = (ROOT / 'scripts/reproduction').glob('*.py')
  assert any(f"'{path.stem}'" in module.read_text() for module in modules)


def test_an_experiment_is_run_once_and_gives_a_page(traces, tmp_path, capsys):
  command = ['policies', '--quick', '--out', str(tmp_path)]
  assert reproduce.main(command) == 0
  assert capsys.readouterr().err.count('mooncake.gin') == 5
  page = (tmp_path / 'reproduction.md').read_text()
  assert '| `random` | 19.6 |' in page and 'holds here' in page
  assert reproduce.main(command) == 0
  assert not capsys.readouterr().err, 'what is kept is not run again'
  assert (tmp_path / 'reproduction.md').read_text() == page


def test_an_unknown_experiment_is_refused(capsys):
  with pytest.raises(SystemExit):
    reproduce.main(['polices'])
  assert 'policies' in capsys.readouterr().err
  assert len(EXPERIMENTS) >= 10


def test_replicas_follow_what_is_stored_and_evicted():
  requests = [
    Request(f'r{i}', 0.0, 64, 1, (b'hot', b'cold')[: 1 + (i < 2)])
    for i in range(12)
  ]
  hot = [Request(f'k{i}', 0.0, 64, 1, (b'%d' % i,) * 20) for i in range(8)]
  events = [
    BlocksStored(1.0, 'prefill0', (b'cold',)),
    BlocksStored(40.0, 'prefill1', (b'cold', b'hot')),
    BlocksEvicted(70.0, 'prefill0', (b'cold',)),
    BlocksEvicted(100.0, 'prefill1', (b'hot',)),
  ]
  # The eight others and b'hot' are used more often: b'cold' has rank 10.
  found = Replicas([*requests, *hot])
  for event in events:
    found.hear(event)
  assert found.counts == {'10': [1, 2, 1]}


def test_loads_are_requests_times_time():
  records = [_record(10.0 * i, 5.0, 20.0) for i in range(6)]
  found = loads(records, duration_s=75.0)
  assert np.isclose(15.0 * sum(found['prefill']), 6 * 5.0, rtol=1e-2)
  assert np.isclose(15.0 * sum(found['decode'][1:3]), 2 * 20.0 * 1.5, rtol=0.2)


def _record(arrival_s: float, prefill_s: float, decode_s: float):
  done_s = arrival_s + prefill_s
  return RequestRecord(
    'r',
    8,
    arrival_s,
    prefill_done_s=done_s,
    first_token_s=done_s,
    finished_s=done_s + decode_s,
  )


def test_no_eviction_exceeds_the_optimal_share():
  def row(*ids):
    return TraceRow(0.0, 512 * len(ids), 1, ids)

  rows = [row(1), row(2), row(1), row(3), row(1), row(2)]
  # Room for one: 1 stays. For two: 1 and 2 stay, 3 passes.
  assert [optimal_share(rows, n) for n in (1, 2, 3)] == [2 / 6, 3 / 6, 3 / 6]
  many = tool_agent(300, seed=3)
  for size in (20, 200, 2000):
    assert optimal_share(many, size) >= exact(many, size).by_token - 0.01
