# SPDX-License-Identifier: Apache-2.0
"""Request records as a Parquet file, for whoever analyses many of them.

A row a record, a column a field, and some figures that are derived from them.
Needs pyarrow, which nothing else does: pip install 'mooncake-jax[parquet]'.
"""

from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from typing import get_args
from typing import get_type_hints

from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.latency import tpot_s
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment

_SEGMENT = get_type_hints(TokenSegment)
# Beside the fields; not read back.
DERIVED = {
  'ttft_s': lambda record: record.ttft_s,
  'tbt_tail_s': tbt_tail_s,
  'tpot_s': tpot_s,
  'num_output_tokens': lambda record: record.num_output_tokens,
}


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
  """The modules pyarrow and pyarrow.parquet.

  Raises:
    ValueError: they are not installed.
  """
  try:
    return import_module('pyarrow'), import_module('pyarrow.parquet')
  except ImportError:
    raise ValueError(
      "Parquet needs pyarrow: pip install 'mooncake-jax[parquet]'"
    ) from None


def write_parquet(path: Path, records: Iterable[RequestRecord]) -> None:
  """One row a record, in order; a segment is a struct of its fields.

  Raises:
    ValueError: pyarrow is not installed.
  """
  pa, parquet = require_pyarrow()
  rows = [_row(record) for record in records]
  parquet.write_table(pa.Table.from_pylist(rows, _schema(pa)), path)


def read_parquet(path: Path) -> list[RequestRecord]:
  """Inverts `write_parquet`.

  Raises:
    ValueError: pyarrow is not installed, or a column is missing.
  """
  _, parquet = require_pyarrow()
  found = parquet.read_table(path)
  names = [field.name for field in fields(RequestRecord)]
  for name in names:
    if name not in found.column_names:
      raise ValueError(f'{path}: column {name} is missing')
  return [_record(row) for row in found.select(names).to_pylist()]


def _row(record: RequestRecord) -> dict[str, Any]:
  row = {field.name: getattr(record, field.name) for field in fields(record)}
  row['reused_tokens'] = [*record.reused_tokens.items()]
  row['segments'] = [
    {name: getattr(segment, name) for name in _SEGMENT}
    for segment in record.segments
  ]
  return row | {name: of(record) for name, of in DERIVED.items()}


def _record(row: dict[str, Any]) -> RequestRecord:
  row['reused_tokens'] = dict(row['reused_tokens'])
  row['segments'] = [TokenSegment(**segment) for segment in row['segments']]
  return RequestRecord(**row)


def _schema(pa: Any) -> Any:
  """By annotation, so that empty columns have the same types."""
  plain = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
  }
  segment = [(name, plain[kind]) for name, kind in _SEGMENT.items()]
  nested = {
    'segments': pa.list_(pa.struct(segment)),
    'output_tokens': pa.list_(pa.int32()),
    'reused_tokens': pa.map_(pa.string(), pa.int64()),
  }
  columns = {
    name: nested.get(name) or plain[_kind(hint)]
    for name, hint in get_type_hints(RequestRecord).items()
  }
  columns |= {name: pa.float64() for name in DERIVED}
  return pa.schema([*(columns | {'num_output_tokens': pa.int64()}).items()])


def _kind(hint: Any) -> type:
  """float of `float | None`, str of a Literal of texts."""
  of = [arg for arg in get_args(hint) if arg is not type(None)] or [hint]
  return of[0] if isinstance(of[0], type) else type(of[0])
