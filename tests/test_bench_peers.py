# SPDX-License-Identifier: Apache-2.0
"""Programs that are measured in turns, and the rows made of their times."""

from dataclasses import replace
import sys
import textwrap

import pytest

from engine_pieces import MODEL
from mooncake_jax.blocks.accounting import kv_bytes
from scripts.benches import turns as turns_module
from scripts.benches.cpp import live_bytes
from scripts.benches.prefill import GEMM
from scripts.benches.prefill import PEERS
from scripts.benches.prefill import throughput_rows
from scripts.benches.prefill import Work
from scripts.benches.turns import interpreter
from scripts.benches.turns import turns

PROGRAM = """
  import time
  from scripts.peers.turns import Child
  child = Child(threads=1)
  def spin(seconds):
    stop = time.process_time() + seconds
    while time.process_time() < stop:
      pass
  def nap(seconds):
    time.sleep(seconds)
  print('a library greets')
  child.answer({'spin': spin, 'nap': nap}, 'a child')
"""


def child(program: str):
  return turns(sys.executable, '-c', textwrap.dedent(program))


def test_a_turn_takes_what_its_work_takes():
  with child(PROGRAM) as program:
    assert program.name == 'a child'
    spun = program.work('spin', seconds=0.1)
    napped = program.work('nap', seconds=0.1)
  assert spun.cpu_s >= 0.1 and spun.wall_s >= 0.09
  assert napped.cpu_s < 0.05 <= napped.wall_s


def test_a_program_that_ends_or_hangs_is_an_error(monkeypatch):
  with pytest.raises(RuntimeError, match='ended'):
    with child('  raise SystemExit(3)'):
      pass
  monkeypatch.setattr(turns_module, 'START_S', 0.2)
  with pytest.raises(RuntimeError, match='says nothing for 0.2 s'):
    with child('  import time; time.sleep(60)'):
      pass


@pytest.fixture
def best():
  """Seconds by program and work."""
  return {
    ('ours', GEMM): 1.0,
    ('ours', Work('prefill', 0, 512, 256)): 2.0,
    ('ours', Work('prefill', 0, 512, 512)): 4.0,
    ('ours', Work('prefill', 0, 2048, 256)): 8.0,
    ('ours', Work('prefill', 1024, 1280, 256)): 2.0,
    ('transformers', Work('prefill', 0, 512, 512)): 3.0,
    ('transformers', Work('prefill', 0, 2048, 2048)): 6.0,
  }


def by_metric(best):
  rows = throughput_rows(1, best, {'transformers': 'hf'})
  return {row.metric.removeprefix('prefill.1_threads.'): row for row in rows}


def test_a_missing_peer_has_a_row_that_says_so(monkeypatch, tmp_path, best):
  monkeypatch.setenv(turns_module.PEERS, str(tmp_path))
  assert [interpreter(name) for name in PEERS] == [None] * len(PEERS)
  missing = by_metric(best)['512.of_vllm']
  assert missing.value is None and missing.ok
  assert 'make peers' in missing.reference


def test_rows_are_ratios_of_the_same_turns(best):
  rows = by_metric(best)
  assert rows['512.tokens_per_s'].value == 256
  assert rows['512.chunked'].value == 0.5 and rows['512.chunked'].ok
  assert rows['512.of_transformers'].value == 1.5
  assert rows['512.chunk_512.tokens_per_s'].value == 128
  assert rows['2048.of_transformers'].value == 0.75
  assert not rows['2048.of_transformers'].ok
  assert '2048.chunked' not in rows
  share = rows['256_on_1024.gemm_share'].value
  assert share is not None and 0 < share < 4


def test_our_program_answers_in_turns():
  about = {'threads': 1, 'config': MODEL.to_hf()}
  about |= {'chunks': [16], 'max_tokens': 64}
  with turns_module.ours('scripts.benches.prefill_turns', about) as program:
    assert program.name.startswith('mooncake_jax')
    assert program.work('gemm', count=1).wall_s > 0
    assert program.work('prefill', start=3, stop=24, chunk=16).cpu_s > 0


def test_live_arrays_of_a_prompt_are_seen():
  config = replace(MODEL, max_tokens=128)
  peak, seconds = live_bytes(config, 128, 32)
  least = kv_bytes(config, 128, 4) + 4 * config.num_params
  assert peak >= least and seconds > 0
