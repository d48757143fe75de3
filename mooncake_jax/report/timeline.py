# SPDX-License-Identifier: Apache-2.0
"""A run as a timeline that Perfetto and chrome://tracing open.

One process an instance; in it the requests lie in rows, each in the first row
that is free, so that what overlaps is seen at once. A request's slices on its
prefill instance are queue, fetch and prefill, on its decode instance transfer
and decode; an arrow joins the two. What the backend did for them stands apart:
'prefill0 stages' has a row a stage with its chunks, so that bubbles are seen,
'prefill0 transfers' the transfers, in rows by kind.
"""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from mooncake_jax.events import WorkDone
from mooncake_jax.request import RequestRecord

_MICROS = 1e6  # the format counts in microseconds
_SLACK_S = 1e-9


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


def timeline(
  records: Sequence[RequestRecord], works: Iterable[WorkDone] = ()
) -> dict[str, Any]:
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
  trace.extend(_works(works, first_pid=len(lives) + 1))
  return {'traceEvents': trace, 'displayTimeUnit': 'ms'}


def work_slices(work: WorkDone) -> Iterator[tuple[str, str, Slice]]:
  """(process, row, slice) of what the backend did."""
  if work.step != 'chunk':
    name = f'{work.step} {work.request_id}'
    piece = Slice(name, work.started_s, work.time_s)
    yield f'{work.instance} transfers', work.step, piece
    return
  name = f'{work.request_id} [{work.start_token}, {work.stop_token})'
  for stage, (start_s, stop_s) in enumerate(work.spans):
    yield (
      f'{work.instance} stages',
      f'stage {stage}',
      Slice(name, start_s, stop_s),
    )


def _works(
  works: Iterable[WorkDone], first_pid: int
) -> Iterator[dict[str, Any]]:
  """Slices of chunks and transfers; what overlaps gets rows of its own."""
  rows: dict[tuple[str, str], list[tuple[Slice, WorkDone]]] = {}
  for work in works:
    for process, row, piece in work_slices(work):
      rows.setdefault((process, row), []).append((piece, work))
  processes = sorted({process for process, _ in rows})
  pids = {name: pid for pid, name in enumerate(processes, first_pid)}
  yield from (_name(pid, name) for name, pid in pids.items())
  tids: dict[int, int] = defaultdict(int)  # rows given away by process
  for (process, row), pieces in sorted(rows.items()):
    pid, first = pids[process], tids[pids[process]]
    free_s: list[float] = []
    for piece, work in sorted(pieces, key=lambda p: p[0].start_s):
      lane = _lane(free_s, piece.start_s, piece.stop_s)
      yield _slice(pid, first + lane, piece, work.step, _about(work))
    tids[pid] += len(free_s)
    yield from (_row_name(pid, first + i, row) for i in range(len(free_s)))


def _lane(free_s: list[float], start_s: float, stop_s: float) -> int:
  """The first row that is free, taken until stop_s."""
  # Spans that meet differ by rounding.
  free = (i for i, t in enumerate(free_s) if t <= start_s + _SLACK_S)
  lane = next(free, len(free_s))
  free_s[lane : lane + 1] = [stop_s]
  return lane


def _about(work: WorkDone) -> dict[str, Any]:
  return {
    'attempt': work.attempt,
    'status': work.status,
    'num_bytes': work.num_bytes,
  }


def _instance(
  pid: int, lives: Iterable[tuple[RequestRecord, list[Slice]]]
) -> list[dict[str, Any]]:
  """All slices of an instance, in rows without overlap."""
  free_s: list[float] = []  # when each row is free again
  trace = []
  for record, slices in sorted(lives, key=lambda life: life[1][0].start_s):
    start_s, stop_s = slices[0].start_s, slices[-1].stop_s
    row = _lane(free_s, start_s, stop_s)
    trace.extend(_event(pid, row, record, piece) for piece in slices)
    trace.extend(_arrow(pid, row, record, slices))
  return trace


def _name(pid: int, name: str) -> dict[str, Any]:
  return {'ph': 'M', 'name': 'process_name', 'pid': pid, 'args': {'name': name}}


def _row_name(pid: int, row: int, name: str) -> dict[str, Any]:
  about = {'name': name}
  return {
    'ph': 'M',
    'name': 'thread_name',
    'pid': pid,
    'tid': row,
    'args': about,
  }


def _event(
  pid: int, row: int, record: RequestRecord, piece: Slice
) -> dict[str, Any]:
  about = {
    'attempt': record.attempt,
    'prompt_tokens': record.prompt_tokens,
    'output_tokens': record.num_output_tokens,
    'reused_tokens': dict(record.reused_tokens),
    'outcome': record.outcome,
  }
  named = piece._replace(name=f'{piece.name} {record.request_id}')
  return _slice(pid, row, named, piece.name, about)


def _slice(
  pid: int, row: int, piece: Slice, category: str, about: dict[str, Any]
) -> dict[str, Any]:
  return {
    'ph': 'X',
    'name': piece.name,
    'cat': category,
    'pid': pid,
    'tid': row,
    'ts': piece.start_s * _MICROS,
    'dur': (piece.stop_s - piece.start_s) * _MICROS,
    'args': about,
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
