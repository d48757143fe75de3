# SPDX-License-Identifier: Apache-2.0
"""Runs what of a sweep is not done, and gathers all of it."""

from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress

from scripts.sweeps import point as points
from scripts.sweeps.grid import Point
from scripts.sweeps.grid import points as make_points
from scripts.sweeps.grid import Sweep
from scripts.sweeps.table import SweepRow
from scripts.sweeps.table import write_csv
from scripts.sweeps.table import write_plot


class Runner(Protocol):
  """Runs points somewhere; each leaves a result in its folder of `out`."""

  def __call__(
    self,
    config: str,
    points: Sequence[Point],
    out: Path,
    *,
    on_end: Callable[[Point], None],
  ) -> None: ...


def run_sweep(
  sweep: Sweep, out: Path, runner: Runner, again: bool = False
) -> list[SweepRow]:
  """All points in the order of the grid, and the files in `out`.

  A point that an earlier sweep into `out` left done is taken from there,
  unless `again`; a failed one is tried again.
  """
  out.mkdir(parents=True, exist_ok=True)
  made = make_points(sweep)
  todo = {point.name: point for point in made if _to_run(point, out, again)}
  for name in todo:
    (out / name / points.RESULT).unlink(missing_ok=True)
  console = Console(force_jupyter=False)
  with Progress(console=console, transient=True) as bar:
    task = bar.add_task('runs', total=len(todo))
    runner(sweep.run, [*todo.values()], out, on_end=lambda _: bar.advance(task))
  rows = [_row(point, out) for point in made]
  write_csv(out / 'table.csv', rows)
  write_plot(out / 'plot.svg', rows, sweep.show[0])
  return rows


def _to_run(point: Point, out: Path, again: bool) -> bool:
  if point.reason:
    return False
  found = points.read(out / point.name)
  return again or found is None or found['status'] != 'done'


def _row(point: Point, out: Path) -> SweepRow:
  if point.reason:
    return SweepRow(point, {}, point.reason)
  found = points.read(out / point.name)
  if found is None:
    return SweepRow(point, {}, 'left no result')
  return SweepRow(point, found.get('figures', {}), found.get('reason', ''))
