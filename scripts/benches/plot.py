# SPDX-License-Identifier: Apache-2.0
"""What benchmarks draw: bytes a second over block size, or curves over time."""

from pathlib import Path

from mooncake_jax.report.lines import line_panels
from scripts.benches.rows import Row


def plot(rows: list[Row], path: Path) -> None:
  """Draws the rows that have a curve, else those that have a point.

  In the format of the path's suffix. All curves have the axes of the first.

  Raises:
    ValueError: no row has one.
  """
  if curves := [(row.metric, row.curve) for row in rows if row.curve]:
    over = {name: {name: curve.points} for name, curve in curves}
    labels = curves[0][1].x_label, curves[0][1].y_label
    line_panels(over, *labels, columns=1).savefig(path)
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
