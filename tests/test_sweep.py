# SPDX-License-Identifier: Apache-2.0
"""Sweeps: what is run, what is kept, what is told."""

from contextlib import contextmanager
import csv
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
import json
import os
from pathlib import Path
import signal
import subprocess
import time
from xml.etree import ElementTree

import pytest

from mooncake_jax.report.lines import line_panels
from scripts import sweep as sweep_script
from scripts.config import ConfigError
from scripts.config import load
from scripts.device import instance_specs
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.sweeps import inline
from scripts.sweeps import on_ray
from scripts.sweeps import processes
from scripts.sweeps import slurm
from scripts.sweeps.grid import parse_axis
from scripts.sweeps.grid import Point
from scripts.sweeps.grid import points
from scripts.sweeps.grid import Sweep
from scripts.sweeps.sweep import run_sweep
from scripts.sweeps.table import panels
from scripts.sweeps.table import SweepRow

SIM = 'configs/run/sim_conversation.gin'
FEW = 'generate.conversation.num_requests=20'
CHUNKS = 'ClusterSpec.chunk_tokens'
SCALE = 'TraceScale.length_scale'


def small(**over) -> Sweep:
  names = {'chunks': CHUNKS, 'scale': SCALE}
  return Sweep(SIM, {names[k]: v for k, v in over.items()}, (FEW,))


def local(timeout_s=60.0):
  return partial(processes.run_points, workers=2, timeout_s=timeout_s)


def test_a_grid_is_every_combination_and_equal_configs_are_one():
  made = points(small(chunks=[1024, 2048], scale=[1.0, 0.5]))
  assert [tuple(point.values.values()) for point in made] == [
    (1024, 1.0),
    (1024, 0.5),
    (2048, 1.0),
    (2048, 0.5),
  ]
  assert len({point.name for point in made}) == 4
  same = points(small(chunks=[8192, 8192]))
  assert len({point.name for point in same}) == 1


def test_runs_on_processes_of_their_own_are_on_devices_too():
  for run, on_devices in ((SIM, False), ('configs/run/ray_small.gin', True)):
    (point,) = points(Sweep(run, {'SLO.ttft_s': [1.0]}))
    assert point.on_devices is on_devices, run


def test_a_list_takes_the_axes_values_together():
  sweep = replace(small(chunks=[1024, 2048], scale=[1.0, 0.5]), mode='list')
  made = [tuple(point.values.values()) for point in points(sweep)]
  assert made == [(1024, 1.0), (2048, 0.5)]
  with pytest.raises(ValueError, match="mode='list' needs axes of one length"):
    replace(small(chunks=[1024], scale=[1.0, 0.5]), mode='list')


def test_draws_are_different_points_and_repeat_with_their_seed():
  whole = small(chunks=[1024, 2048, 4096, 8192], scale=[1.0, 0.5, 0.25])
  sweep = replace(whole, mode='random', draws=8)
  made = [tuple(point.values.values()) for point in points(sweep)]
  assert len({*made}) == 8
  assert {*made} <= {tuple(p.values.values()) for p in points(whole)}
  assert made == [tuple(point.values.values()) for point in points(sweep)]
  other = points(replace(sweep, seed=1))
  assert made != [tuple(point.values.values()) for point in other]
  assert len(points(replace(sweep, draws=99))) == 12


def test_ranges_are_drawn_from(capsys):
  name, written = parse_axis('ClusterSpec.host_bytes=log_uniform(1000, 10**9)')
  assert (name, written[:3]) == ('ClusterSpec.host_bytes', 'log')
  sweep = Sweep(
    SIM,
    {
      'ClusterSpec.host_bytes': 'log_uniform(1_000_000, 1_000_000_000)',
      'ConductorSpec.work_weight': 'uniform(0.5, 2)',
      CHUNKS: [1024, 2048],
    },
    (FEW,),
    mode='random',
    draws=40,
  )
  rows = [point.values for point in points(sweep)]
  sizes = [row['ClusterSpec.host_bytes'] for row in rows]
  assert all(type(n) is int and 1e6 <= n <= 1e9 for n in sizes)
  assert 10 < sum(n < 3e7 for n in sizes) < 30
  weights = [row['ConductorSpec.work_weight'] for row in rows]
  assert all(type(w) is float and 0.5 <= w <= 2 for w in weights)
  assert {row[CHUNKS] for row in rows} == {1024, 2048}
  with pytest.raises(ValueError, match="needs Sweep.mode='random'"):
    replace(sweep, mode='grid')
  for bad in ('uniform(2, 1)', 'log_uniform(0, 1)', 'uniform(a, 1)', 'all'):
    with pytest.raises(ValueError, match='must read|is no range'):
      points(replace(sweep, over={'ConductorSpec.work_weight': bad}))


@pytest.mark.parametrize(
  'text', ['X.y', 'X.y=3', 'X.y=[]', 'X.y=[1,', 'X.y=[a]']
)
def test_an_axis_that_is_none_is_named(text):
  with pytest.raises(ConfigError, match='--over '):
    parse_axis(text)


def test_an_axis_may_have_functions_beside_names():
  name, values = parse_axis("X.y=[@my_eviction.mine, 'lru', None, (1, 2.5)]")
  assert name == 'X.y' and values[1:] == ['lru', None, (1, 2.5)]
  assert repr(values[0]) == '@my_eviction.mine'
  drawn = panels(
    [SweepRow(Point({'y': v}, (), 'a'), {'hit': 0.5}) for v in values], 'hit'
  )
  texts = ['@my_eviction.mine', 'lru', 'None', '(1, 2.5)']
  assert [x for x, _ in drawn['']['']] == texts
  line_panels(drawn, 'y', 'hit')


def test_a_wrong_name_ends_the_sweep_before_it_begins(tmp_path, capsys):
  over = ['--over', 'ClusterSpec.chunk_token=[1, 2]', '--out', str(tmp_path)]
  with pytest.raises(SystemExit) as ended:
    sweep_script.main([SIM, *over])
  assert ended.value.code == 2 and not (tmp_path / 'table.csv').exists()
  assert "nearest: 'chunk_tokens'" in capsys.readouterr().err


def test_a_sweep_leaves_one_table_one_plot_and_a_folder_a_run(tmp_path, capsys):
  over = ['--over', f'{CHUNKS}=[1024, 8192]', '--show', 'ttft_s.p50']
  command = [SIM, '--bind', FEW, *over, '--out', str(tmp_path)]
  assert sweep_script.main(command) == 0
  with (tmp_path / 'table.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row[CHUNKS] for row in rows] == ['1024', '8192']
  for row in rows:
    summary = json.loads(
      (tmp_path / row['folder'] / 'summary.json').read_text()
    )
    assert summary['ttft_s']['p50'] == float(row['ttft_s.p50'])
    assert row['failed'] == ''
  drawn = ElementTree.parse(tmp_path / 'plot.svg')
  assert drawn.getroot().tag.endswith('svg')
  assert 'ttft_s.p50' in capsys.readouterr().out


def times_of(out: Path) -> dict[str, int]:
  return {
    path.parent.name: path.stat().st_mtime_ns
    for path in out.glob('*/point.json')
  }


def test_what_is_done_is_not_run_again_and_the_rest_is(tmp_path):
  run_sweep(small(chunks=[1024]), tmp_path, local())
  before = times_of(tmp_path)
  rows = run_sweep(small(chunks=[1024, 2048]), tmp_path, local())
  after = times_of(tmp_path)
  assert before.items() < after.items() and len(after) == 2
  assert all(row.figures for row in rows)
  run_sweep(small(chunks=[1024]), tmp_path, local(), again=True)
  assert times_of(tmp_path) != after


def test_a_run_killed_in_the_middle_is_run_again(tmp_path):
  (row,) = run_sweep(small(chunks=[1024]), tmp_path, local())
  whole = row.figures
  (tmp_path / row.point.name / 'point.json').unlink()
  (again,) = run_sweep(small(chunks=[1024]), tmp_path, local())
  assert again.figures == whole


def test_a_sweep_killed_in_the_middle_goes_on_without_loss(tmp_path):
  """As SLURM does it: a job is killed, and requeued with the same command."""
  axis = f'{CHUNKS}=[1024, 2048, 4096, 8192, 16384]'
  bind = ['--bind', 'generate.conversation.num_requests=60']
  command = [SIM, *bind, '--over', axis]
  out = tmp_path / 'killed'
  script = str(ROOT / 'scripts/slurm/sweep.sbatch')
  job = {'SLURM_SUBMIT_DIR': str(ROOT), 'SLURM_CPUS_PER_TASK': '2'}
  process = subprocess.Popen(
    ['bash', script, *command, '--out', str(out)],
    env={**os.environ, **job, 'PYTHONPATH': str(ROOT)},
    start_new_session=True,
    stdout=subprocess.DEVNULL,
  )
  deadline_s = time.monotonic() + 120
  while not times_of(out) and time.monotonic() < deadline_s:
    time.sleep(0.02)
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  done = times_of(out)
  assert 1 <= len(done) < 5
  assert sweep_script.main([*command, '--out', str(out)]) == 0
  assert done.items() <= times_of(out).items() and len(times_of(out)) == 5
  assert sweep_script.main([*command, '--out', str(tmp_path / 'whole')]) == 0
  tables = [(tmp_path / name / 'table.csv').read_text() for name in NAMES]
  assert tables[0] == tables[1]


NAMES = ('killed', 'whole')


def test_failures_keep_their_reason_and_the_others_go_on(tmp_path):
  # 0.3 of a block is no whole token: known once the run begins. -1 is known
  # before.
  rows = run_sweep(small(scale=[0.3, 0.5, -1.0]), tmp_path, local())
  reasons = [row.reason for row in rows]
  assert 'length_scale=0.3 makes 153.6' in reasons[0]
  assert reasons[1] == '' and rows[1].figures['completed'] == 20
  assert 'TraceScale.length_scale=-1.0 must be' in reasons[2]
  found = json.loads((tmp_path / rows[0].point.name / 'point.json').read_text())
  assert found['status'] == 'failed'


def test_a_run_that_takes_too_long_is_ended(tmp_path):
  (row,) = run_sweep(small(chunks=[1024]), tmp_path, local(timeout_s=0.01))
  assert row.reason == 'took longer than 0.01 s'


def test_jobs_of_submitit_give_what_processes_give(tmp_path):
  pytest.importorskip('submitit')
  there = partial(
    slurm.run_points, workers=2, options={'timeout_min': 2}, cluster='local'
  )
  wanted = small(scale=[0.3, 0.5])
  far = run_sweep(wanted, tmp_path / 'far', there)
  near = run_sweep(wanted, tmp_path / 'near', local())
  assert [row.figures for row in far] == [row.figures for row in near]
  assert [row.reason for row in far] == [row.reason for row in near]


@pytest.mark.filterwarnings('ignore')
def test_tasks_of_ray_give_what_processes_give(tmp_path):
  if find_spec('ray') is None:
    pytest.skip('Ray is not installed')
  there = partial(on_ray.run_points, address=None, workers=2, timeout_s=120.0)
  wanted = small(scale=[0.3, 0.5])
  far = run_sweep(wanted, tmp_path / 'far', there)
  near = run_sweep(wanted, tmp_path / 'near', local())
  assert [row.figures for row in far] == [row.figures for row in near]
  assert [row.reason for row in far] == [row.reason for row in near]
  assert (
    'completed'
    in (tmp_path / 'far' / far[1].point.name / 'log.txt').read_text()
  )


def test_runs_in_this_process_give_what_processes_give(tmp_path, capsys):
  wanted = small(scale=[0.3, 0.5])
  here = run_sweep(wanted, tmp_path / 'here', inline.run_points)
  near = run_sweep(wanted, tmp_path / 'near', local())
  assert [row.figures for row in here] == [row.figures for row in near]
  assert [row.reason for row in here] == [row.reason for row in near]
  assert 'completed' not in capsys.readouterr().out


def test_runs_in_this_process_have_the_instances_that_a_process_makes(
  tmp_path, monkeypatch
):
  """Padding and layer groups: 64 tokens were once computed as 256."""
  opened: list[Experiment] = []
  num_open = 0

  @contextmanager
  def backends(experiment, config):
    nonlocal num_open
    num_open += 1
    assert num_open == 1, 'memory is for one'
    opened.append(experiment)
    yield lambda at_s=0.0: None
    num_open -= 1

  def run_here(config, bindings, folder, shared):
    del folder
    own = load(config, bindings, Experiment)[0]
    model = own.model.read_config()
    with shared(own, model):
      there = opened[-1]
    assert instance_specs(there.cluster, model) == instance_specs(
      own.cluster, model
    )
    assert there.attention == own.attention

  monkeypatch.setattr(inline, 'backends', backends)
  monkeypatch.setattr(inline.point, 'run_here', run_here)
  sweep = Sweep(
    'configs/run/cpp_small.gin',
    {
      'ClusterSpec.chunk_tokens': [64, 1024],
      'ClusterSpec.streaming': ['layers', 'prompt'],
      'Experiment.attention': ['auto', 'jnp'],
      'distinct_prompts.count': [1, 2],
    },
  )
  ended = []
  inline.run_points(sweep.run, points(sweep), tmp_path, ended.append)
  assert len(ended) == 16 and len(opened) == 8


def test_options_of_slurm_are_read_and_wrong_ones_named(tmp_path):
  assert slurm.parse_options(['timeout_min=60', 'slurm_partition=gpu']) == {
    'timeout_min': 60,
    'slurm_partition': 'gpu',
  }
  with pytest.raises(ConfigError, match='must read KEY=VALUE'):
    slurm.parse_options(['gpu'])
  wrong = partial(
    slurm.run_points, workers=1, options={'gpu': 1}, cluster='local'
  )
  with pytest.raises(ConfigError, match='--slurm: .*gpu'):
    run_sweep(small(chunks=[1024]), tmp_path, wrong)


def test_a_sweep_file_holds_axes_that_the_command_line_adds_to(tmp_path):
  file = tmp_path / 'sweep.gin'
  file.write_text(
    'from __gin__ import dynamic_registration\n'
    'import scripts.sweeps.grid as grid\n'
    f"grid.Sweep.run = '{SIM}'\n"
    f"grid.Sweep.over = {{'{CHUNKS}': [1, 2]}}\n"
    f"grid.Sweep.bind = ('{FEW}',)\n"
  )
  over = [f'{CHUNKS}=[4]', f'{SCALE}=[1.0]']
  read = sweep_script.read_sweep(str(file), over, ['X.y=1'], ['hit_rate'])
  assert read.over == {CHUNKS: [4], SCALE: [1.0]}
  assert read.bind == (FEW, 'X.y=1') and read.show[0] == 'hit_rate'
  with pytest.raises(ConfigError, match='nothing to sweep'):
    sweep_script.read_sweep(SIM, [], [], [])
