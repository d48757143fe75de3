# SPDX-License-Identifier: Apache-2.0
"""What a sweep gains by running its points as processes.

The same points once one after another in one process and once by
`sweeps.processes`, two at a time, in turns; seconds of the wall. On a machine
with other work the ratio says what that left.
"""

from collections.abc import Iterator
from functools import partial
import os
from pathlib import Path
from tempfile import TemporaryDirectory
import time

from scripts.benches.rows import Row
from scripts.sweeps import inline
from scripts.sweeps import processes
from scripts.sweeps.grid import Sweep
from scripts.sweeps.sweep import run_sweep
from scripts.sweeps.sweep import Runner

RUN = 'configs/run/sim_conversation.gin'
TURNS = 2
CORES = 2


def sweeps(quick: bool) -> Iterator[Row]:
  """24 simulations (6 with `quick`) on two cores against one process."""
  seeds = range(6 if quick else 24)
  requests = 200 if quick else 800
  sweep = Sweep(
    RUN,
    {'ConductorSpec.seed': [*seeds]},
    bind=(
      f'generate.conversation.num_requests={requests}',
      'Experiment.keeps_journal=False',
    ),
  )
  apart = partial(processes.run_points, workers=CORES, timeout_s=600.0)
  one_s, two_s = [], []
  for _ in range(1 if quick else TURNS):
    one_s.append(_seconds(sweep, inline.run_points))
    two_s.append(_seconds(sweep, apart))
  yield Row(
    'sweep.speedup',
    min(one_s) / min(two_s),
    'ratio',
    f'{len(seeds)} runs, {CORES} at a time on {os.cpu_count()} cores: '
    f'{min(two_s):.1f} s, one process {min(one_s):.1f} s',
    1.7,
  )


def _seconds(sweep: Sweep, runner: Runner) -> float:
  with TemporaryDirectory() as folder:
    start_s = time.perf_counter()
    rows = run_sweep(sweep, Path(folder), runner)
    seconds = time.perf_counter() - start_s
  assert all(not row.reason for row in rows), rows
  return seconds
