# SPDX-License-Identifier: Apache-2.0
"""Records and journal of a run as JSON lines, and back."""

from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from mooncake_jax import events
from mooncake_jax.events import Event
from mooncake_jax.report.codec import decode
from mooncake_jax.report.codec import encode
from mooncake_jax.report.codec import read_lines
from mooncake_jax.report.codec import write_lines
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.serve import Decision
from mooncake_jax.serve import Journal


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
  """One record a line; a segment has the numbers of `TokenSegment`."""
  write_lines(path, map(record_to_json, records))


def read_records(path: Path) -> list[RequestRecord]:
  """Inverts `write_records`.

  Raises:
    ValueError: a line that is not a record; names file, line and field.
  """
  return [record_from_json(where, item) for where, item in read_lines(path)]


def record_to_json(record: RequestRecord) -> dict[str, Any]:
  """What `json.dumps` takes."""
  segments = [[*astuple(s)] for s in record.segments]
  return encode(record) | {'segments': segments}


def record_from_json(where: str, item: dict[str, Any]) -> RequestRecord:
  """Inverts `record_to_json`; a ValueError begins with `where`."""
  try:
    record = decode(item | {'segments': []}, RequestRecord)
    record.segments = [TokenSegment(*numbers) for numbers in item['segments']]
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{where}: {error}') from None
  return record


def write_journal(path: Path, journal: Journal) -> None:
  """One decision or event a line, its class under the name 'event'."""
  write_lines(
    path,
    ({'event': type(entry).__name__} | encode(entry) for entry in journal),
  )


def read_journal(path: Path) -> Journal:
  """Inverts `write_journal`: what `serve.replay` takes.

  Raises:
    ValueError: a line that is none; names file, line and field.
  """
  return [_entry_from_json(where, item) for where, item in read_lines(path)]


def _entry_from_json(where: str, item: dict[str, Any]) -> Decision | Event:
  name = item.pop('event', None)
  cls = _ENTRIES.get(name)
  if cls is None:
    raise ValueError(f'{where}: event={name!r} is not an event')
  try:
    return decode(item, cls)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from None


_ENTRIES: dict[Any, type] = {
  name: cls
  for name, cls in vars(events).items()
  if isinstance(cls, type) and cls.__module__ == events.__name__
} | {'Decision': Decision}
