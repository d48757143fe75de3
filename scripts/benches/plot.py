# SPDX-License-Identifier: Apache-2.0
"""Bytes a second over block size: a panel a case, a line a way."""

import math
from pathlib import Path

from scripts.benches.rows import Row

COLUMNS = 4
PANEL_INCHES = (4.0, 3.0)


def plot(rows: list[Row], path: Path) -> None:
  """Draws the rows that have a point, in the format of the path's suffix.

  Raises:
    ValueError: no row has one.
  """
  panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
  for row in rows:
    if row.point and row.value is not None:
      ways = panels.setdefault(row.point.panel, {})
      at = (row.point.size_bytes, row.value / 1e9)
      ways.setdefault(row.point.way, []).append(at)
  if not panels:
    raise ValueError(f'--plot {path}: these benchmarks have no series')
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  columns = min(COLUMNS, len(panels))
  lines = math.ceil(len(panels) / columns)
  width, height = PANEL_INCHES
  figure = Figure((width * columns, height * lines), layout='constrained')
  grid = figure.subplots(lines, columns, squeeze=False).flat
  names = sorted({way for ways in panels.values() for way in ways})
  for axes, (panel, ways) in zip(grid, panels.items()):
    for way, points in sorted(ways.items()):
      sizes, speeds = zip(*sorted(points))
      color = f'C{names.index(way) % 10}'
      axes.plot([s / 1024 for s in sizes], speeds, 'o-', color=color, label=way)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.set_title(panel, fontsize=9)
    axes.set_xlabel('KiB a block')
    axes.set_ylabel('GB/s')
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
  for axes in [*grid]:
    axes.set_visible(False)
  figure.savefig(path)
