# SPDX-License-Identifier: Apache-2.0
"""Small plots as SVG text, to stand in a page without other files."""

from collections.abc import Mapping
from collections.abc import Sequence
import io
from typing import Any

import numpy as np

SIZE_INCHES = (4.6, 2.8)
COLORS = ('#2a5caa', '#d08020', '#3a8a4a', '#8a4a9a', '#606060')


def distribution(
  values_s: Sequence[float], limit_s: float | None, label: str
) -> str:
  """Share of requests at or below each time; the limit is a dashed line."""
  return distributions({'': values_s}, limit_s, label)


def distributions(
  by_name: Mapping[str, Sequence[float]], limit_s: float | None, label: str
) -> str:
  """The same with a line for each of several named runs."""
  figure, axes = _axes(label)
  for i, (name, values_s) in enumerate(by_name.items()):
    ordered = np.sort(np.asarray(values_s, float))
    ratios = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    color = COLORS[i % len(COLORS)]
    axes.step(ordered, ratios, where='post', color=color, label=name)
  if limit_s is not None:
    axes.axvline(limit_s, linestyle='--', color='#b03030', linewidth=1)
  if len(by_name) > 1:
    axes.legend(fontsize=7)
  axes.set_xlim(left=0)
  axes.set_ylim(0, 1.02)
  axes.set_xlabel('seconds')
  axes.set_ylabel('share of requests')
  return svg(figure)


def shares(by_name: Mapping[str, float], label: str) -> str:
  """One bar a name, each a ratio 0-1."""
  figure, axes = _axes(label)
  names = list(by_name)
  axes.barh(names[::-1], [by_name[n] for n in names[::-1]], color=COLORS[0])
  axes.set_xlim(0, 1)
  axes.set_xlabel('share of prompt tokens')
  return svg(figure)


def intervals(
  by_name: Mapping[str, tuple[float, float, float]], x_label: str, label: str
) -> str:
  """One bar a name; a line from its least to its most."""
  figure, axes = _axes(label)
  names = list(by_name)[::-1]
  low, value, high = (
    np.array([by_name[name][i] for name in names]) for i in range(3)
  )
  axes.barh(
    names,
    value,
    xerr=np.abs([value - low, high - value]),
    color=COLORS[0],
    error_kw={'ecolor': COLORS[1], 'capsize': 3},
  )
  axes.set_xlabel(x_label)
  return svg(figure)


def _axes(label: str) -> tuple[Any, Any]:
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  figure = Figure(figsize=SIZE_INCHES, layout='constrained')
  axes = figure.subplots()
  axes.set_title(label, fontsize=10)
  axes.spines[['top', 'right']].set_visible(False)
  return figure, axes


def svg(figure: Any) -> str:
  """The <svg> element alone; the same figure gives the same text."""
  import matplotlib as mpl

  buffer = io.StringIO()
  with mpl.rc_context({'svg.hashsalt': 'mooncake', 'svg.fonttype': 'none'}):
    figure.savefig(buffer, format='svg', metadata={'Date': None})
  text = buffer.getvalue()
  return text[text.index('<svg') :]
