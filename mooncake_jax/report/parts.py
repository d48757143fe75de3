# SPDX-License-Identifier: Apache-2.0
"""Paragraphs, lists and tables of a page, as HTML."""

from collections.abc import Iterable
from collections.abc import Sequence
from html import escape

from mooncake_jax.metrics.table import number

Cell = str | float | None


def paragraph(text: str) -> str:
  return f'<p>{escape(text)}</p>'


def listed(title: str, items: Iterable[str]) -> str:
  lines = ''.join(f'<li>{escape(item)}</li>' for item in items)
  return f'<h3>{escape(title)}</h3><ul>{lines}</ul>'


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
  """Scrolls by itself where the window is narrower."""
  head = ''.join(f'<th>{escape(each)}</th>' for each in columns)
  body = ''.join(
    f'<tr>{"".join(f"<td>{escape(_cell(c))}</td>" for c in row)}</tr>'
    for row in rows
  )
  return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def pair(seconds: Sequence[float]) -> str:
  """P50 / P99."""
  return ' / '.join(f'{each:.2g}' for each in seconds)


def tokens(count: int | None) -> str:
  """From how many on."""
  return 'never' if count is None else f'{count:,}'


def _cell(value: Cell) -> str:
  if isinstance(value, str):
    return value
  if value is not None and abs(value) >= 1000:
    return f'{value:,.0f}'
  return number(value)
