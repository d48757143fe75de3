# SPDX-License-Identifier: Apache-2.0
"""Bars in rows over time: what was busy when, and what was idle."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

ROW_INCHES = 0.32
WIDTH_INCHES = 9.0
# Bars narrower than this share of the picture have no text.
LEAST_SHARE = 0.02


class Bar(NamedTuple):
  """[start_s, stop_s) in a row; bars of one group have one colour."""

  row: str
  start_s: float
  stop_s: float
  group: int
  text: str = ''


def gantt(panels: dict[str, Sequence[Bar]]) -> Any:
  """The figure: a panel each, on one time axis, rows from above in order."""
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  rows = {
    title: list(dict.fromkeys(bar.row for bar in bars))
    for title, bars in panels.items()
  }
  heights = [len(names) + 2 for names in rows.values()]
  size = (WIDTH_INCHES, ROW_INCHES * sum(heights) + 0.4)
  figure = Figure(size, layout='constrained')
  all_axes = figure.subplots(
    len(panels), sharex=True, squeeze=False, height_ratios=heights
  )[:, 0]
  for axes, (title, bars) in zip(all_axes, panels.items()):
    _draw(axes, bars, rows[title])
    axes.set_title(title, fontsize=9, loc='left')
  all_axes[-1].set_xlabel('seconds')
  return figure


def _draw(axes: Any, bars: Sequence[Bar], names: list[str]) -> None:
  end_s = max((bar.stop_s for bar in bars), default=0.0)
  for bar in bars:
    y, width = names.index(bar.row), bar.stop_s - bar.start_s
    color = f'C{bar.group % 10}'
    axes.barh(
      y, width, left=bar.start_s, color=color, edgecolor='white', linewidth=0.5
    )
    if bar.text and width > LEAST_SHARE * end_s:
      middle_s = bar.start_s + width / 2
      axes.text(
        middle_s, y, bar.text, ha='center', va='center', fontsize=7, color='w'
      )
  axes.set_yticks(range(len(names)), names, fontsize=8)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.set_xlim(left=0)
  axes.spines[['top', 'right']].set_visible(False)
