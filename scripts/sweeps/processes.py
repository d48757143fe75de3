# SPDX-License-Identifier: Apache-2.0
"""Points of a sweep as processes of this machine, a few at a time.

Each is forked from a server that has imported all but JAX, so a simulation
starts at once, and a run on devices chooses its own number of them.
"""

from collections.abc import Callable
from collections.abc import Sequence
import multiprocessing
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
import os
from pathlib import Path
import time

from scripts.sweeps import point
from scripts.sweeps.grid import Point


def run_points(
  config: str,
  points: Sequence[Point],
  out: Path,
  workers: int,
  timeout_s: float,
  on_end: Callable[[Point], None],
) -> None:
  """Runs all points; each leaves a result in its folder of `out`.

  Args:
    workers: at a time; 0 is one a core, or one where they run on devices,
      whose times the others would spoil.
    timeout_s: a run that takes longer is killed.
  """
  workers = workers or _default_workers(points)
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['scripts.sweeps.point'])
  waiting = list(reversed(points))
  running: dict[BaseProcess, tuple[Point, float]] = {}
  try:
    while waiting or running:
      while waiting and len(running) < workers:
        each = waiting.pop()
        process = context.Process(
          target=point.run_point,
          args=(config, each.bindings, out / each.name),
        )
        process.start()
        running[process] = (each, time.monotonic() + timeout_s)
      _await_one(running, out, timeout_s, on_end)
  finally:
    for process in running:
      process.kill()
      process.join()


def _default_workers(points: Sequence[Point]) -> int:
  return 1 if any(p.on_devices for p in points) else os.cpu_count() or 1


def _await_one(
  running: dict[BaseProcess, tuple[Point, float]],
  out: Path,
  timeout_s: float,
  on_end: Callable[[Point], None],
) -> None:
  """Waits until one process ends or is late; every one has a result then."""
  next_s = min(deadline_s for _, deadline_s in running.values())
  wait([p.sentinel for p in running], max(next_s - time.monotonic(), 0.0))
  for process, (each, deadline_s) in [*running.items()]:
    late = process.is_alive() and time.monotonic() >= deadline_s
    if process.is_alive() and not late:
      continue
    if late:
      process.kill()
    process.join()
    del running[process]
    folder = out / each.name
    if point.read(folder) is None:
      why = point.reason(folder, process.exitcode)
      why = f'took longer than {timeout_s:g} s' if late else why
      point.write(folder, {'status': 'failed', 'reason': why})
    on_end(each)
