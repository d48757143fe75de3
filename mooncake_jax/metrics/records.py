# SPDX-License-Identifier: Apache-2.0
"""Request records from the events of a run, and from nothing else."""

import sys

from mooncake_jax.events import Cancelled
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import Stopped
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment


class RecordBook:
  """One record a request, in the order the requests came."""

  def __init__(self):
    self._records: dict[str, RequestRecord] = {}
    # Tokens that a new try emits once more, which its client has already.
    self._repeated: dict[str, int] = {}
    # When tries that were preempted last were; None once they are back.
    self._preempted: dict[str, float | None] = {}
    # Prompt tokens that its tries had so far, and the last one's prefix.
    self._reached: dict[str, int] = {}
    self._prefix: dict[str, int] = {}

  @property
  def records(self) -> list[RequestRecord]:
    return list(self._records.values())

  def __getitem__(self, request_id: str) -> RequestRecord:
    return self._records[request_id]

  def __contains__(self, request_id: str) -> bool:
    return request_id in self._records

  def forget(self, request_id: str) -> None:
    """Lets a record go that has ended; nothing more is told of it."""
    del self._records[request_id]
    self._repeated.pop(request_id, None)
    self._preempted.pop(request_id, None)
    self._reached.pop(request_id, None)
    self._prefix.pop(request_id, None)

  def refused(self, request: Request, reason: str, now_s: float) -> None:
    """A request that can't be served at all."""
    record = self._open(request)
    record.outcome, record.reason, record.finished_s = 'failed', reason, now_s

  def decided(
    self, request: Request, decision: Placement | Rejection, now_s: float
  ) -> None:
    """The Conductor placed or rejected it, for the first time or again."""
    record = self._records.get(request.request_id)
    if record is None or record.outcome != 'running':
      record = self._open(request)
    record.predicted_ttft_s = decision.ttft_s
    record.predicted_tbt_s = decision.tbt_s
    if isinstance(decision, Rejection):
      record.outcome, record.reason = 'rejected', decision.reason
      record.finished_s = now_s
      return
    record.attempt = decision.attempt
    self._preempted.pop(request.request_id, None)
    record.prefill, record.decode = decision.prefill, decision.decode
    record.predicted_queue_s = decision.queue_s
    record.predicted_transfer_s = decision.transfer_s
    record.predicted_prefill_s = decision.prefill_s
    record.placed_s = now_s
    if decision.attempt:
      self._repeated[request.request_id] = record.num_output_tokens

  def retried(self, event: Failed) -> None:
    """A try has failed and will be made again."""
    record = self._records[event.request_id]
    self._computed(record, event)
    self._back(record, event)

  def emitted(self, emitted: Emitted) -> None:
    """Writes tokens down, of each of its tries that goes on."""
    segment, tokens = emitted.segment, emitted.tokens
    for i, (request_id, attempt) in enumerate(emitted.tries):
      record = self._records[request_id]
      if record.attempt == attempt:
        self._emitted(record, segment, tokens[i : i + 1])

  def observe(self, event: Event) -> RequestRecord | None:
    """Writes an event down; returns the record if that was its last."""
    if isinstance(event, TokensEmitted):
      self.emitted(event.emitted)
    if not isinstance(event, RequestEvent):
      return None
    record = self._records[event.request_id]
    if record.attempt != event.attempt:
      return None
    if self._preempted and event.request_id in self._preempted:
      return self._resumed(record, event)
    match event:
      case Preempted():
        self._preempt(record, event)
      case PrefixFetched():
        record.fetch_start_s = event.started_s
        self._reused(record, event)
      case PrefillDone():
        record.prefill_start_s = event.started_s
        record.prefill_done_s = event.time_s
        self._computed(record, event)
      case KVArrived():
        record.kv_arrived_s = event.time_s
      case _:
        return self._close(record, event)
    return None

  def _preempt(self, record: RequestRecord, event: Preempted) -> None:
    record.preemptions += 1
    self._preempted[event.request_id] = event.time_s
    # Whatever it computes from now on, it had already.
    self._reached[event.request_id] = sys.maxsize

  def _resumed(
    self, record: RequestRecord, event: RequestEvent
  ) -> RequestRecord | None:
    """An event of a try after its preemption: its first life stands."""
    match event:
      case Preempted():
        self._preempt(record, event)
      case PrefixFetched():
        self._reused(record, event)
      case PrefillDone():
        self._computed(record, event)
      case KVArrived():
        self._back(record, event)
      case _:
        return self._close(record, event)
    return None

  def _back(self, record: RequestRecord, event: RequestEvent) -> None:
    """Its KVCache is back, or it ends without, as at its last token."""
    since_s = self._preempted.get(event.request_id)
    if since_s is not None:
      record.preempted_s += event.time_s - since_s
      self._preempted[event.request_id] = None

  def _reused(self, record: RequestRecord, event: PrefixFetched) -> None:
    """Counts the prefix as reused, but for what an earlier try had."""
    name, passed = event.request_id, 0
    known = self._reached.get(name, 0)
    for tier, count in (
      ('local_device', event.device_tokens),
      ('local_host', event.local_tokens),
      ('local_ssd', event.ssd_tokens),
      ('remote_host', event.remote_tokens),
      ('remote_store', event.store_tokens),
    ):
      passed += count
      if (new := min(count, passed - known)) > 0:
        before = record.reused_tokens.get(tier, 0)
        record.reused_tokens[tier] = before + new
    self._prefix[name] = passed
    self._reached[name] = max(known, passed)

  def _computed(
    self, record: RequestRecord, event: PrefillDone | Stopped
  ) -> None:
    """Counts what a try computed, and what of it an earlier one had."""
    name = event.request_id
    start, known = self._prefix.pop(name, 0), self._reached.get(name, 0)
    stop = start + event.computed_tokens
    record.prefill_s += event.prefill_s
    record.recomputed_tokens += max(min(known, stop) - start, 0)
    self._reached[name] = max(known, stop)

  def _emitted(
    self,
    record: RequestRecord,
    segment: TokenSegment,
    tokens: tuple[int, ...],
  ) -> None:
    """Writes tokens down, less those that an earlier try had emitted."""
    if self._repeated and self._repeated.get(record.request_id):
      skip = min(self._repeated[record.request_id], segment.count)
      self._repeated[record.request_id] -= skip
      tokens = tokens[skip:]
      segment = segment.without(skip)
    if not segment.count:
      return
    if record.first_token_s is None:
      record.first_token_s = segment.first_s
    record.segments.append(segment)
    if tokens:
      record.output_tokens += tokens

  def _open(self, request: Request) -> RequestRecord:
    name = request.request_id
    if name in self._records:
      raise ValueError(f'request_id={name!r} came twice')
    record = RequestRecord(
      name,
      request.num_prompt_tokens,
      request.arrival_s,
      reuse_known=request.reuse_known,
    )
    self._records[name] = record
    return record

  def _close(
    self, record: RequestRecord, event: RequestEvent
  ) -> RequestRecord | None:
    match event:
      case Finished():
        record.outcome = 'completed'
      case Failed():
        record.outcome, record.reason = 'failed', event.reason
      case Cancelled():
        record.outcome, record.reason = 'cancelled', 'cancelled'
      case RejectedLate():
        record.outcome, record.reason = 'rejected_late', event.reason
      case _:
        return None
    if isinstance(event, Stopped):
      self._computed(record, event)
    self._back(record, event)
    record.finished_s = event.time_s
    return record
