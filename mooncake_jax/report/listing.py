# SPDX-License-Identifier: Apache-2.0
"""A small table that a notebook shows as one and a terminal as text."""

from collections.abc import Sequence
from typing import Any

from mooncake_jax.metrics.table import number


class Listing:
  """Columns and rows; numbers to four digits, None as a dash."""

  def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]):
    self.columns = [*columns]
    self.rows = [[_cell(value) for value in row] for row in rows]

  def _repr_markdown_(self) -> str:
    lines = [self.columns, ['---:'] * len(self.columns), *self.rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)

  def __repr__(self) -> str:
    lines = [self.columns, *self.rows]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    return '\n'.join(
      '  '.join(map(str.rjust, line, widths)).rstrip() for line in lines
    )


def _cell(value: Any) -> str:
  if value is None or isinstance(value, int | float):
    return number(value)
  return str(value)
