# SPDX-License-Identifier: Apache-2.0
"""A run as a timeline that Perfetto and chrome://tracing open.

One process an instance; in it the requests lie in rows, each in the first row
that is free, so that what overlaps is seen at once. A request's slices on its
prefill instance are queue, fetch and prefill, on its decode instance transfer
and decode; an arrow joins the two.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from mooncake_jax.request import RequestRecord

_MICROS = 1e6  # the format counts in microseconds


class Slice(NamedTuple):
  """[start_s, stop_s) of one request's life on one instance."""

  name: str
  start_s: float
  stop_s: float


def prefill_slices(record: RequestRecord) -> list[Slice]:
  """Queue, fetch and prefill, as far as the request came."""
  placed = record.placed_s
  fetch, prefill = record.fetch_start_s, record.prefill_start_s
  queued_until = fetch if fetch is not None else prefill
  return _slices(
    ('queue', placed, queued_until),
    ('fetch', fetch, prefill),
    ('prefill', prefill, record.prefill_done_s),
  )


def decode_slices(record: RequestRecord) -> list[Slice]:
  """Transfer and decode, as far as the request came."""
  return _slices(
    ('transfer', record.prefill_done_s, record.kv_arrived_s),
    ('decode', record.kv_arrived_s, record.finished_s),
  )


def _slices(*spans: tuple[str, float | None, float | None]) -> list[Slice]:
  return [
    Slice(name, start, stop)
    for name, start, stop in spans
    if start is not None and stop is not None and stop >= start
  ]


def timeline(records: Sequence[RequestRecord]) -> dict[str, Any]:
  """The whole run in the Chrome trace format."""
  lives: dict[str, list[tuple[RequestRecord, list[Slice]]]] = {}
  for record in records:
    for name, slices in (
      (record.prefill, prefill_slices(record)),
      (record.decode, decode_slices(record)),
    ):
      if name is not None and slices:
        lives.setdefault(name, []).append((record, slices))
  trace: list[dict[str, Any]] = []
  for pid, name in enumerate(sorted(lives), 1):
    trace.append(_name(pid, name))
    trace.extend(_instance(pid, lives[name]))
  return {'traceEvents': trace, 'displayTimeUnit': 'ms'}


def _instance(
  pid: int, lives: Iterable[tuple[RequestRecord, list[Slice]]]
) -> list[dict[str, Any]]:
  """All slices of an instance, in rows without overlap."""
  free_s: list[float] = []  # when each row is free again
  trace = []
  for record, slices in sorted(lives, key=lambda life: life[1][0].start_s):
    start_s, stop_s = slices[0].start_s, slices[-1].stop_s
    row = next((i for i, t in enumerate(free_s) if t <= start_s), len(free_s))
    free_s[row : row + 1] = [stop_s]
    trace.extend(_event(pid, row, record, piece) for piece in slices)
    trace.extend(_arrow(pid, row, record, slices))
  return trace


def _name(pid: int, name: str) -> dict[str, Any]:
  return {'ph': 'M', 'name': 'process_name', 'pid': pid, 'args': {'name': name}}


def _event(
  pid: int, row: int, record: RequestRecord, piece: Slice
) -> dict[str, Any]:
  return {
    'ph': 'X',
    'name': f'{piece.name} {record.request_id}',
    'cat': piece.name,
    'pid': pid,
    'tid': row,
    'ts': piece.start_s * _MICROS,
    'dur': (piece.stop_s - piece.start_s) * _MICROS,
    'args': {
      'attempt': record.attempt,
      'prompt_tokens': record.prompt_tokens,
      'output_tokens': record.num_output_tokens,
      'reused_tokens': dict(record.reused_tokens),
      'outcome': record.outcome,
    },
  }


def _arrow(
  pid: int, row: int, record: RequestRecord, slices: list[Slice]
) -> list[dict[str, Any]]:
  """From the end of prefill to the begin of what the decode instance does."""
  if record.kv_arrived_s is None or record.prefill_done_s is None:
    return []
  begins = slices[-1].name == 'prefill'
  # An arrow hangs on the slice that it lies inside of, end excluded.
  time_us = record.prefill_done_s * _MICROS - (1e-3 if begins else 0)
  arrow = {
    'ph': 's' if begins else 'f',
    'name': 'KVCache',
    'cat': 'transfer',
    'id': record.request_id,
    'pid': pid,
    'tid': row,
    'ts': time_us,
  }
  return [arrow if begins else arrow | {'bp': 'e'}]
