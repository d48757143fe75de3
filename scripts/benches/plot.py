# SPDX-License-Identifier: Apache-2.0
"""What benchmarks draw: bytes a second over block size, or curves over time."""

from pathlib import Path
from typing import Any

from mooncake_jax.report.lines import line_panels
from scripts.benches.rows import Curve
from scripts.benches.rows import Row

CURVE_INCHES = (9.0, 2.6)
MARK = '#b03030'


def plot(rows: list[Row], path: Path) -> None:
  """Draws the rows that have a curve, else those that have a point.

  In the format of the path's suffix.

  Raises:
    ValueError: no row has one.
  """
  if curves := [(row.metric, row.curve) for row in rows if row.curve]:
    over_time(curves).savefig(path)
    return
  panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
  for row in sorted(rows, key=lambda row: row.metric):
    if row.point and row.value is not None:
      ways = panels.setdefault(row.point.panel, {})
      at = (row.point.size_bytes / 1024, row.value / 1e9)
      ways.setdefault(row.point.way, []).append(at)
  if not panels:
    raise ValueError(f'--plot {path}: these benchmarks have no series')
  line_panels(panels, 'KiB a block', 'GB/s', log_y=True).savefig(path)


def over_time(curves: list[tuple[str, Curve]]) -> Any:
  """One wide panel a curve, from 0 on; its marks are lines across."""
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  width, height = CURVE_INCHES
  figure = Figure((width, height * len(curves)), layout='constrained')
  for axes, (name, curve) in zip(
    figure.subplots(len(curves), squeeze=False).flat, curves
  ):
    axes.plot(*zip(*curve.points), drawstyle='steps-mid', linewidth=1)
    for at in curve.marks:
      axes.axvline(at, color=MARK, linewidth=0.5, alpha=0.6)
    axes.set_title(f'{name}; {curve.about}' if curve.about else name)
    axes.set_xlabel(curve.x_label)
    axes.set_ylabel(curve.y_label)
    axes.margins(x=0, y=0.1)
    axes.set_ylim(bottom=0)
  return figure
