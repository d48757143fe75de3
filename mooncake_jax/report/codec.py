# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of this package to and from JSON, by their annotations.

Bytes (block keys) become hex, tuples become lists, a dataclass becomes an
object of its fields. Reading inverts it, so that recorded runs can be
replayed.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import fields
from dataclasses import is_dataclass
import functools
import json
from pathlib import Path
import types
import typing
from typing import Any
from typing import get_args
from typing import get_origin
from typing import TypeVar

import numpy as np

T = TypeVar('T')


def encode(value: Any) -> Any:
  """What `json.dumps` takes, for a value made of dataclasses."""
  if is_dataclass(value) and not isinstance(value, type):
    return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
  if isinstance(value, bytes):
    return value.hex()
  if isinstance(value, Mapping):
    return {str(k): encode(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [encode(item) for item in value]
  if isinstance(value, np.generic):
    return value.item()
  return value


def decode(value: Any, hint: Any) -> Any:
  """Inverts `encode` for a value that was annotated with `hint`.

  Raises:
    ValueError: an object has a field that the dataclass lacks, or misses one.
  """
  if value is None:
    return None
  origin, args = get_origin(hint), get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return decode(value, _arm(value, args))
  if is_dataclass(hint):
    return _decode_dataclass(value, hint)
  if hint is bytes:
    return bytes.fromhex(value)
  if origin is tuple:
    return tuple(decode(item, args[0]) for item in value)
  if origin is list:
    return [decode(item, args[0]) for item in value]
  return value


def _arm(value: Any, args: tuple[Any, ...]) -> Any:
  """Which of a union's types `value` was; dataclasses differ in fields."""
  arms = [arg for arg in args if arg is not type(None)]
  fitting = (a for a in arms if is_dataclass(a) and set(value) <= {*_hints(a)})
  return next(fitting, arms[0])


def _decode_dataclass(value: Mapping[str, Any], hint: Any) -> Any:
  hints = _hints(hint)
  unknown = sorted(set(value) - set(hints))
  if unknown:
    raise ValueError(f'{hint.__name__} has no field {unknown[0]!r}')
  kwargs = {name: decode(item, hints[name]) for name, item in value.items()}
  try:
    return hint(**kwargs)
  except TypeError as error:
    raise ValueError(f'{hint.__name__}: {error}') from None


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
  return typing.get_type_hints(cls)


def write_lines(path: Path, objects: Iterable[Any]) -> None:
  """One JSON object a line."""
  with path.open('w') as file:
    for item in objects:
      file.write(json.dumps(item, separators=(',', ':')) + '\n')


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """('file:line', object) of each line; a ValueError names a broken one."""
  with path.open() as file:
    for number, line in enumerate(file, 1):
      where = f'{path}:{number}'
      try:
        item = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f'{where}: not JSON: {error}') from None
      if not isinstance(item, dict):
        raise ValueError(f'{where}: not a JSON object')
      yield where, item
