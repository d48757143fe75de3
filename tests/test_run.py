# SPDX-License-Identifier: Apache-2.0
"""The scripts run as a user runs them; every run file builds."""

import json
from pathlib import Path

import jax
import pytest

from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from scripts import run
from scripts.config import load
from scripts.device import start_jax
from scripts.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
SIM = 'configs/run/sim_conversation.gin'
FEW = 'generate.conversation.num_requests=40'


@pytest.mark.parametrize(
  'path', sorted(ROOT.glob('configs/run/*.gin')), ids=lambda path: path.stem
)
def test_every_run_file_builds_and_tells_its_command(path, request):
  text = path.read_text()
  name = path.relative_to(ROOT)
  assert text.startswith('# ') and f'scripts/run.py {name}' in text
  if 'published' in text:
    request.getfixturevalue('traces')  # skips where there are none
  experiment, operative = load(path, (), Experiment)
  assert experiment.title in operative


def test_a_simulation_leaves_a_whole_results_folder(tmp_path):
  assert run.main([SIM, '--bind', FEW, '--out', str(tmp_path)]) == 0
  summary = json.loads((tmp_path / 'summary.json').read_text())
  records = read_records(tmp_path / 'records.jsonl')
  assert summary['offered'] == len(records) == 40
  assert summary['completed'] == 40
  assert read_journal(tmp_path / 'events.jsonl')


def test_the_same_run_twice_gives_the_same_records(tmp_path):
  for name in ('a', 'b'):
    run.main([SIM, '--bind', FEW, '--out', str(tmp_path / name)])
  assert read_records(tmp_path / 'a/records.jsonl') == read_records(
    tmp_path / 'b/records.jsonl'
  )


def test_the_operative_config_of_a_run_runs_again(tmp_path):
  run.main([SIM, '--bind', FEW, '--out', str(tmp_path / 'a')])
  operative = str(tmp_path / 'a/operative_config.gin')
  run.main([operative, '--out', str(tmp_path / 'b')])
  assert (tmp_path / 'a/summary.json').read_text() == (
    tmp_path / 'b/summary.json'
  ).read_text()


@pytest.mark.parametrize('given', [None, '/scratch/of-this-node'])
def test_compiled_programs_lie_where_the_user_says(given):
  """A checkout may be read-only, or one for all nodes."""
  name = 'jax_compilation_cache_dir'
  before = getattr(jax.config, name)
  try:
    jax.config.update(name, given)
    start_jax(1)
    assert getattr(jax.config, name) == (given or str(ROOT / '.jax_cache'))
  finally:
    jax.config.update(name, before)


def test_a_run_with_other_bindings_has_a_folder_of_its_own():
  assert run.name_of(SIM, []) == Path(SIM).stem
  base = run.name_of('a/sim.gin', ["X.policy='random'", 'Y.n = 1_000'])
  assert base == 'sim-policy=random-n=1_000'
  assert run.name_of('sim.gin', ['X.y=@a/b.c()']) == 'sim-y=@a_b.c_'
  long = [run.name_of('sim.gin', [f'X.y={"9" * n}']) for n in (300, 301)]
  assert len({*long}) == 2 and max(map(len, long)) < 120


@pytest.mark.parametrize(
  'bind, status, wanted',
  [
    (
      'ClusterSpec.chunk_token=1',
      2,
      'error: --bind: cluster_spec.ClusterSpec.chunk_token: cluster_spec.'
      "ClusterSpec has no parameter 'chunk_token'; nearest: 'chunk_tokens'",
    ),
    ('ClusterSpec.chunk_tokens=0', 2, 'ClusterSpec.chunk_tokens=0 must be'),
    ("ConductorSpec.policy='best'", 2, "policy='best' is not one of"),
    ('TraceScale.time_scale=-1', 2, 'TraceScale.time_scale=-1 must be'),
    ('TraceScale.length_scale=0.3', 1, 'length_scale=0.3 makes 153.6 of 512'),
  ],
)
def test_a_wrong_binding_ends_in_one_line(
  capsys, tmp_path, bind, status, wanted
):
  with pytest.raises(SystemExit) as ended:
    run.main([SIM, '--bind', bind, '--out', str(tmp_path)])
  message = capsys.readouterr().err
  assert ended.value.code == status
  assert message.count('\n') == 1 and wanted in message
