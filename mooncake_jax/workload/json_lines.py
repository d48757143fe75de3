# SPDX-License-Identifier: Apache-2.0
"""One JSON object a line, and errors that name file, line, field and value."""

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any
from typing import TypeVar

T = TypeVar('T')


def read_lines(
  path: str | Path, parse: Callable[[bytes, str | Path, int], T]
) -> tuple[list[T], list[str]]:
  """What `parse` makes of each line, and the errors of the bad ones.

  Args:
    parse: of a line that is not empty, the file and the line's number.

  Raises:
    OSError: the file can't be opened.
  """
  found, errors = [], []
  with open(path, 'rb') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        try:
          found.append(parse(line, path, number))
        except ValueError as error:
          errors.append(str(error))
  return found, errors


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
  """The object of a line; `where` is 'file:line' and heads errors.

  Raises:
    ValueError: it is no JSON, or no object.
  """
  try:
    fields = json.loads(line)
  except (ValueError, RecursionError) as error:
    text = line.decode(errors='replace') if isinstance(line, bytes) else line
    raise ValueError(
      f'{where}: not JSON ({error}): {short(text.strip())}'
    ) from None
  if not isinstance(fields, dict):
    raise ValueError(f'{where}: not a JSON object: {short(fields)}')
  return fields


def value_of(fields: dict[str, Any], key: str, where: str) -> Any:
  """fields[key].

  Raises:
    ValueError: it is missing.
  """
  if key not in fields:
    raise ValueError(f'{where}: {key} is missing, found {short([*fields])}')
  return fields[key]


def number_of(
  fields: dict[str, Any], key: str, where: str, limit: float
) -> float:
  """A number in [0, limit).

  Raises:
    ValueError: it is missing or something else.
  """
  value = value_of(fields, key, where)
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not (number and 0 <= value < limit):
    raise ValueError(f'{where}: {key}={short(value)} must be a number >= 0')
  return value


def count_of(fields: dict[str, Any], key: str, where: str) -> int:
  """An integer >= 1.

  Raises:
    ValueError: it is missing or something else.
  """
  value = value_of(fields, key, where)
  if type(value) is not int or value < 1:
    raise ValueError(f'{where}: {key}={short(value)} must be an integer >= 1')
  return value


def short(value: Any) -> str:
  """At most 60 characters of repr, on one line."""
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + '...'
