# SPDX-License-Identifier: Apache-2.0
"""What the status page shows, as plain values for JSON.

Beliefs are the Conductor's and are read in the loop's thread (`fleet`); all
else comes from records of requests that have ended or, read there too, run
(`life`). Everything is bounded, however large the cluster and however long it
runs.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from mooncake_jax.blocks.segments import MEDIA
from mooncake_jax.conductor.view import View
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.latency import tpot_s
from mooncake_jax.metrics.summary import statistics
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO
from mooncake_jax.store.statistics import SegmentUse

MOST_INSTANCES = 64  # of each role, the busiest
_DIGITS = 6  # microseconds
Life = dict[str, Any]


class PrefillStatus(NamedTuple):
  """A prefill instance: whether it takes requests, and what waits there."""

  name: str
  open: bool
  queued: int
  queue_s: float


class DecodeStatus(NamedTuple):
  """A decode instance: its batch and what of its KVCache room is taken."""

  name: str
  open: bool
  rows: int
  max_batch: int
  used_tokens: int
  room_tokens: int


class MediumStatus(NamedTuple):
  """All segments of one medium together."""

  medium: str
  segments: int
  blocks: int
  used_bytes: int
  capacity_bytes: int


def fleet(
  view: View, segments: Sequence[SegmentUse], now_s: float
) -> dict[str, Any]:
  """Instances as the Conductor sees them, the store as the Master does.

  Of many instances the busiest are listed; the totals are of all.
  """
  prefill, decode = _prefill(view, now_s), _decode(view)
  return {
    'prefill': {
      'instances': sum(each.open for each in prefill),
      'queued': sum(each.queued for each in prefill),
      'queue_s': max((each.queue_s for each in prefill), default=0.0),
      'busiest': _busiest(prefill, lambda p: (p.queue_s, p.queued)),
    },
    'decode': {
      'instances': sum(each.open for each in decode),
      'rows': sum(each.rows for each in decode),
      'used_tokens': sum(each.used_tokens for each in decode),
      'room_tokens': sum(each.room_tokens for each in decode),
      'busiest': _busiest(decode, lambda d: (d.used_tokens, d.rows)),
    },
    'store': [each._asdict() for each in _media(segments)],
  }


def _prefill(view: View, now_s: float) -> list[PrefillStatus]:
  loads = view.prefill
  queue_s = loads.queue_s_I(now_s).tolist()
  return [
    PrefillStatus(name, accepts, loads.depth(name), seconds)
    for name, accepts, seconds in zip(
      loads.names, loads.accepts_I.tolist(), queue_s
    )
  ]


def _decode(view: View) -> list[DecodeStatus]:
  loads = view.decode
  columns = (
    loads.accepts_I,
    loads.active_rows_I,
    loads.max_batch_I,
    loads.reserved_tokens_I,
    loads.capacity_tokens_I,
  )
  listed = (column.tolist() for column in columns)
  return [DecodeStatus(*row) for row in zip(loads.names, *listed)]


def _busiest(instances: Sequence[Any], load: Any) -> list[dict[str, Any]]:
  """The busiest, in their own order."""
  there = [each for each in instances if each.open or any(load(each))]
  kept = sorted(there, key=load, reverse=True)[:MOST_INSTANCES]
  names = {each.name for each in kept}
  return [each._asdict() for each in there if each.name in names]


def _media(segments: Sequence[SegmentUse]) -> list[MediumStatus]:
  found = []
  for medium in MEDIA:
    of_it = [segment for segment in segments if segment.medium == medium]
    if of_it:
      found.append(
        MediumStatus(
          medium,
          len(of_it),
          sum(segment.num_copies for segment in of_it),
          sum(segment.used_bytes for segment in of_it),
          sum(segment.capacity_bytes for segment in of_it),
        )
      )
  return found


def life(record: RequestRecord, now_s: float) -> Life:
  """A request until `now_s`, or its end: when, where and how long.

  Nothing of what was said; all times are those of the records.
  """
  return {
    'id': record.request_id,
    'outcome': record.outcome,
    'reason': record.reason,
    'arrival_s': round(record.arrival_s, _DIGITS),
    'end_s': record.finished_s,
    'prefill': record.prefill,
    'decode': record.decode,
    'prompt_tokens': record.prompt_tokens,
    'reuse_known': record.reuse_known,
    'prefilled': record.prefill_done_s is not None,
    'reused_tokens': dict(record.reused_tokens),
    'output_tokens': record.num_output_tokens,
    'ttft_s': record.ttft_s,
    # Of what runs it would change with every token, and cost too much.
    'tbt_s': None if record.finished_s is None else tbt_tail_s(record),
    'tpot_s': tpot_s(record),
    'preemptions': record.preemptions,
    'spans': spans(record, now_s),
  }


def spans(
  record: RequestRecord, now_s: float
) -> list[tuple[str, float, float]]:
  """(what, start_s, stop_s) of a life so far; the last is open while it runs.

  What it did not come to is left out, and what an earlier try came to.
  """
  begins = (
    ('queue', record.placed_s),
    ('fetch', record.fetch_start_s),
    ('prefill', record.prefill_start_s),
    ('transfer', record.prefill_done_s),
    ('decode', record.kv_arrived_s),
  )
  known: list[tuple[str, float]] = []
  for what, at in begins:
    if at is not None and (not known or at >= known[-1][1]):
      known.append((what, at))
  end_s = now_s if record.finished_s is None else record.finished_s
  if record.finished_s is None and known and known[-1][0] == 'fetch':
    # Its begin is told at its end; the begin of prefill at prefill's.
    known[-1] = ('prefill', known[-1][1])
  stops = [*(at for _, at in known[1:]), end_s]
  return [
    (what, round(start, _DIGITS), round(max(stop, start), _DIGITS))
    for (what, start), stop in zip(known, stops)
  ]


def figures(ended: Sequence[Life], slo: SLO) -> dict[str, Any]:
  """What the lives of ended requests sum up to, as in `metrics.summary`."""
  completed = [each for each in ended if each['outcome'] == 'completed']
  kept = [slo.kept(each['ttft_s'], each['tbt_s']) for each in completed]
  offered = len(ended)
  return {
    'offered': offered,
    'outcomes': dict(Counter(each['outcome'] for each in ended)),
    'rejection_reasons': _rejection_reasons(ended),
    'effective_request_capacity': _share(map(all, kept), offered),
    'ttft_attainment': _share((ttft for ttft, _ in kept), offered),
    'tbt_attainment': _share((tbt for _, tbt in kept), offered),
    'ttft_s': statistics([each['ttft_s'] for each in completed]),
    'tbt_tail_s': statistics([each['tbt_s'] for each in completed]),
    'hit_rate_by_tier': _hits(ended),
    'output_tokens': sum(each['output_tokens'] for each in completed),
  }


def _share(kept: Iterable[bool], offered: int) -> float | None:
  return sum(kept) / offered if offered else None


def _hits(ended: Sequence[Life]) -> dict[str, float] | None:
  """Shares of prompt tokens by tier; None where nobody can know."""
  known = [each for each in ended if each['reuse_known'] and each['prefilled']]
  tokens = sum(each['prompt_tokens'] for each in known)
  reused: Counter[str] = Counter()
  for each in known:
    reused.update(each['reused_tokens'])
  if not known:
    return None
  return {tier: n / tokens for tier, n in sorted(reused.items())}


def _rejection_reasons(ended: Sequence[Life]) -> dict[str, int]:
  return dict(
    Counter(
      each['reason']
      for each in ended
      if each['outcome'] in ('rejected', 'rejected_late')
    )
  )
