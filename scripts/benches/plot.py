# SPDX-License-Identifier: Apache-2.0
"""Bytes a second over block size: a panel a case, a line a way."""

from pathlib import Path

from mooncake_jax.report.lines import line_panels
from scripts.benches.rows import Row


def plot(rows: list[Row], path: Path) -> None:
  """Draws the rows that have a point, in the format of the path's suffix.

  Raises:
    ValueError: no row has one.
  """
  panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
  for row in sorted(rows, key=lambda row: row.metric):
    if row.point and row.value is not None:
      ways = panels.setdefault(row.point.panel, {})
      at = (row.point.size_bytes / 1024, row.value / 1e9)
      ways.setdefault(row.point.way, []).append(at)
  if not panels:
    raise ValueError(f'--plot {path}: these benchmarks have no series')
  line_panels(panels, 'KiB a block', 'GB/s', log_y=True).savefig(path)
