# SPDX-License-Identifier: Apache-2.0
"""A sweep's one table and one plot."""

from collections.abc import Mapping
from collections.abc import Sequence
import csv
from pathlib import Path
from typing import Any
from typing import NamedTuple

from rich.table import Table

from mooncake_jax.metrics.table import number
from mooncake_jax.report.lines import line_panels
from mooncake_jax.report.lines import Panels
from scripts.sweeps.grid import Point


class SweepRow(NamedTuple):
  """A point and what it gave.

  Attributes:
    figures: by name, of a run that is done.
    reason: why there are none.
  """

  point: Point
  figures: Mapping[str, float | None]
  reason: str = ''


def short_names(axes: Sequence[str]) -> dict[str, str]:
  """'module.Class.parameter' -> 'parameter', where that names one axis."""
  last = [axis.rpartition('.')[2] for axis in axes]
  return {
    axis: name if last.count(name) == 1 else axis
    for axis, name in zip(axes, last)
  }


def printed(rows: Sequence[SweepRow], show: Sequence[str], title: str) -> Table:
  """Axes, then figures; why those failed that did."""
  table = Table(title=title, title_justify='left')
  names = short_names([*rows[0].point.values])
  for column in (*names.values(), *show):
    table.add_column(column, justify='right')
  if any(row.reason for row in rows):
    table.add_column('failed')
  for row in rows:
    cells = [str(value) for value in row.point.values.values()]
    figures = [number(row.figures.get(name)) for name in show]
    table.add_row(*cells, *figures, *filter(None, [row.reason]))
  return table


def write_csv(path: Path, rows: Sequence[SweepRow]) -> None:
  """Every figure of every point, not only those shown."""
  axes = [*rows[0].point.values]
  figures = list(dict.fromkeys(name for row in rows for name in row.figures))
  with path.open('w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow([*axes, *figures, 'folder', 'failed'])
    for row in rows:
      values = [row.figures.get(name) for name in figures]
      own = [row.point.name, row.reason]
      writer.writerow([*row.point.values.values(), *values, *own])


def panels(rows: Sequence[SweepRow], figure: str) -> Panels:
  """A line for each value of the second axis, a panel for the others'."""
  found: dict[str, dict[str, list[tuple[Any, float]]]] = {}
  names = short_names([*rows[0].point.values])
  firsts = [next(iter(row.point.values.values())) for row in rows]
  # What cannot be ordered is text: None, 'lru' beside @my.eviction.
  numbers = all(isinstance(first, int | float) for first in firsts)
  for row in rows:
    value = row.figures.get(figure)
    (x, *rest) = row.point.values.items()
    if value is None:
      continue
    labels = [f'{names[axis]} {chosen}' for axis, chosen in rest]
    lines = found.setdefault(', '.join(labels[1:]), {})
    lines.setdefault(', '.join(labels[:1]), []).append(
      (x[1] if numbers else str(x[1]), value)
    )
  return found


def write_plot(path: Path, rows: Sequence[SweepRow], figure: str) -> None:
  """Draws `panels`; nothing where no point has the figure."""
  drawn = panels(rows, figure)
  if drawn:
    axis = next(iter(rows[0].point.values))
    line_panels(drawn, short_names([axis])[axis], figure).savefig(path)
