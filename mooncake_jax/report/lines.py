# SPDX-License-Identifier: Apache-2.0
"""Panels of lines: one figure over another, by case and by way."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

# Panel -> line -> points (x, y), in any order; x may be text.
Panels = Mapping[str, Mapping[str, Sequence[tuple[Any, float]]]]
COLUMNS = 4
PANEL_INCHES = (4.0, 3.0)
# From this ratio of largest to smallest on, an axis is logarithmic.
WIDE = 8


def line_panels(
  panels: Panels,
  x_label: str,
  y_label: str,
  columns: int = COLUMNS,
  log_y: bool = False,
) -> Any:
  """The figure; a way has one colour in all panels."""
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  columns = min(columns, len(panels))
  rows = math.ceil(len(panels) / columns)
  width, height = PANEL_INCHES
  figure = Figure((width * columns, height * rows), layout='constrained')
  grid = figure.subplots(rows, columns, squeeze=False).flat
  names = list(dict.fromkeys(name for ways in panels.values() for name in ways))
  for axes, (panel, ways) in zip(grid, panels.items()):
    for name, points in ways.items():
      x, y = zip(*sorted(points))
      axes.plot(x, y, 'o-', color=f'C{names.index(name) % 10}', label=name)
    _style(axes, panel, x_label, y_label, log_y)
    if _wide(ways):
      axes.set_xscale('log', base=2)
    if any(ways):
      axes.legend(fontsize=7)
  for axes in [*grid]:
    axes.set_visible(False)
  return figure


def _style(
  axes: Any, panel: str, x_label: str, y_label: str, log_y: bool
) -> None:
  if log_y:
    axes.set_yscale('log')
  axes.set_title(panel, fontsize=9)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.grid(alpha=0.3)


def _wide(ways: Mapping[str, Sequence[tuple[Any, float]]]) -> bool:
  """Whether x are positive numbers that span much."""
  x = [at for points in ways.values() for at, _ in points]
  if not x or not all(isinstance(at, int | float) and at > 0 for at in x):
    return False
  return max(x) >= WIDE * min(x)
