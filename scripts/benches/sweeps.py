# SPDX-License-Identifier: Apache-2.0
"""What a sweep gains by running its points as processes.

The same command once with all points in one process, one after another, and
once with two processes at a time, in turns; seconds of the whole command, by
the wall. On a machine with other work the ratio says what that left.
"""

from collections.abc import Iterator
import os
import subprocess
import sys
from tempfile import TemporaryDirectory
import time

from scripts.benches.rows import Row
from scripts.gin_source import ROOT

RUN = 'configs/run/sim_conversation.gin'
TURNS = 2
CORES = 2


def sweeps(quick: bool) -> Iterator[Row]:
  """24 simulations (6 with `quick`) on two cores against one process."""
  runs, requests = (6, 200) if quick else (24, 800)
  command = [
    RUN,
    f'--over=ConductorSpec.seed={[*range(runs)]}',
    f'--bind=generate.conversation.num_requests={requests}',
    '--bind=Experiment.keeps_journal=False',
  ]
  one_s, two_s = [], []
  for _ in range(1 if quick else TURNS):
    one_s.append(_seconds([*command, '--inline']))
    two_s.append(_seconds([*command, f'--workers={CORES}']))
  yield Row(
    'sweep.speedup',
    min(one_s) / min(two_s),
    'ratio',
    f'{runs} runs, {CORES} at a time on {os.cpu_count()} cores: '
    f'{min(two_s):.1f} s, one process {min(one_s):.1f} s',
    1.7,
  )


def _seconds(command: list[str]) -> float:
  with TemporaryDirectory() as folder:
    start_s = time.perf_counter()
    subprocess.run(
      [sys.executable, 'scripts/sweep.py', *command, f'--out={folder}'],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.DEVNULL,
      check=True,
      timeout=1800,
    )
    return time.perf_counter() - start_s
