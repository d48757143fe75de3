# SPDX-License-Identifier: Apache-2.0
"""Rows of a CSV file with a header, and errors that name file, line and field.

A header without the columns asked for ends the reading: the file is not what
it was said to be. A bad line costs itself alone.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import csv
from pathlib import Path
from typing import Any
from typing import TypeVar

from mooncake_jax.workload.json_lines import short

T = TypeVar('T')
# Text by column.
Fields = dict[str, str]
MAX_COUNT = 2**31  # tokens: each 512 of a prompt get a number in memory


def read_csv(
  path: str | Path,
  columns: Sequence[str],
  parse: Callable[[Fields, str], T],
) -> tuple[list[T], list[str]]:
  """What `parse` makes of each row, and the errors of the bad ones.

  Args:
    columns: that the header must have; others may be there.
    parse: of a row's fields and 'file:line', which heads its ValueErrors.

  Raises:
    ValueError: no header, one that lacks a column, or what is no CSV.
    OSError: the file can't be opened.
  """
  rows, errors = [], []
  with open(path, encoding='utf-8-sig', errors='replace', newline='') as file:
    lines = _cells(path, csv.reader(file))
    _, header = next(lines, (1, []))
    for column in columns:
      if column not in header:
        raise ValueError(
          f'{path}:1: {column} is missing, found {short(header)}'
        )
    for number, cells in lines:
      if cells:
        where = f'{path}:{number}'
        try:
          rows.append(parse(_fields(header, cells, where), where))
        except ValueError as error:
          errors.append(str(error))
  return rows, errors


def whole_in(
  fields: Fields, key: str, where: str, least: int = 0, limit: int = MAX_COUNT
) -> int:
  """An integer in [least, limit).

  Raises:
    ValueError: it is something else.
  """
  text = fields[key].strip()
  # Not int() alone: it takes '1_000' and other alphabets' digits as well.
  is_plain = text.isascii() and text.isdigit() and len(text) < 20
  if not is_plain or not least <= int(text) < limit:
    raise ValueError(
      f'{where}: {key}={short(text)} must be an integer >= {least} and below '
      f'{limit}'
    )
  return int(text)


def number_in(
  fields: Fields, key: str, where: str, limit: float = 1e12
) -> float:
  """A number in [0, limit).

  Raises:
    ValueError: it is something else.
  """
  text = fields[key].strip()
  try:
    value = float(text)
  except ValueError:
    value = -1.0
  if not 0 <= value < limit:
    raise ValueError(f'{where}: {key}={short(text)} must be a number >= 0')
  return value


def _cells(path: str | Path, lines: Any) -> Iterator[tuple[int, list[str]]]:
  """A reader's line numbers and cells."""
  try:
    for cells in lines:
      yield lines.line_num, cells
  except csv.Error as error:
    raise ValueError(f'{path}:{lines.line_num}: not CSV: {error}') from None


def _fields(header: list[str], cells: list[str], where: str) -> Fields:
  if len(cells) != len(header):
    raise ValueError(
      f'{where}: {len(cells)} cells but the header has {len(header)}: '
      f'{short(cells)}'
    )
  return dict(zip(header, cells))
