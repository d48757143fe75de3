# SPDX-License-Identifier: Apache-2.0
"""The cluster: instances and store over one backend, as one state machine.

It carries out effects, turns completions into events and ends runs. Each
work under way belongs to a run or to a decode batch; a run's pages are freed
when it has ended and no work touches them, so nothing late lands in reused
pages.
"""

from collections.abc import Iterable
import heapq

from mooncake_jax.backend import Backend
from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import RowTokens
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.instance.decode import Recheck
from mooncake_jax.instance.make import make_decode
from mooncake_jax.instance.make import make_prefill
from mooncake_jax.instance.run import Drop
from mooncake_jax.instance.run import failed
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import RunKey
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Stop
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.storing import copying
from mooncake_jax.instance.storing import dropped
from mooncake_jax.instance.storing import InstanceStore
from mooncake_jax.instance.storing import stored
from mooncake_jax.instance.works import Works
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.request import TokenSegment
from mooncake_jax.store.client import StoreClient
from mooncake_jax.store.setup import adopt
from mooncake_jax.store.setup import lose
from mooncake_jax.store.setup import make_master

REAP_EVERY_S = 1.0


class Cluster:
  """Prefill and decode instances, their store and the backend."""

  def __init__(
    self,
    spec: ClusterSpec,
    model: ModelConfig,
    backend: Backend,
    recheck: Recheck | None = None,
  ):
    """Makes an idle cluster with empty segments.

    Args:
      spec: sizes and counts.
      model: whose KVCache it holds.
      backend: where time passes; has the instances that `spec` names.
      recheck: see `DecodeInstance`.
    """
    self.spec = spec
    self.backend = backend
    self.layout = spec.layout(model)
    self.max_tokens = spec.max_request_tokens(model)
    self.master = make_master(spec, self.layout.block_bytes)
    self._client = StoreClient(self.master, self.layout)
    self.prefill = {
      name: make_prefill(spec, self.layout, self._client, name)
      for name in spec.prefill_names
    }
    self.decode = {
      name: make_decode(spec, self.layout, name, recheck)
      for name in spec.decode_names
    }
    self._runs: dict[RunKey, Run] = {}
    self._works = Works(spec, backend)
    self._deadlines: list[tuple[float, RunKey]] = []
    self._reaped_s = 0.0
    self._events: list[Event] = self._adopt()
    self._held_back: dict[str, set[str]] = {}

  # Requests in and out.

  def refusal(self, request: Request) -> str:
    """Why this request can never be served; '' if it can."""
    total = request.num_prompt_tokens + request.max_output_tokens
    if total > self.max_tokens:
      return (
        f'num_prompt_tokens={request.num_prompt_tokens} + '
        f'max_output_tokens={request.max_output_tokens} exceeds '
        f'max_tokens={self.max_tokens}'
      )
    blocks = request.num_prompt_tokens // self.layout.block_size_tokens
    if len(request.block_keys) != blocks:
      return (
        f'{len(request.block_keys)} block_keys for {blocks} complete '
        f'blocks of {self.layout.block_size_tokens} tokens'
      )
    return ''

  def submit(self, request: Request, placement: Placement) -> None:
    """Accepts a placed request; its events come from `step`."""
    run = Run(request, placement)
    assert run.key not in self._runs, run.key
    assert not self.refusal(request), self.refusal(request)
    self._runs[run.key] = run
    now_s = self.backend.now_s()
    heapq.heappush(
      self._deadlines,
      (request.arrival_s + self.spec.request_timeout_s, run.key),
    )
    self.prefill[placement.prefill].enqueue(run, now_s)
    self._start_next(placement.prefill)

  def cancel(self, request_id: str) -> None:
    """Ends the request's tries; their pages go as soon as works allow."""
    for key, run in list(self._runs.items()):
      if key[0] == request_id and not run.ended:
        self._apply(
          [Cancelled(self.backend.now_s(), *key, run.placement.prefill)]
        )

  def inventory(self, segment: str) -> tuple[BlockKey, ...]:
    """Keys that the segment can serve."""
    return self.master.inventory(segment)

  def lose_segment(self, segment: str) -> None:
    """All bytes of a segment are lost; it goes on empty. Reads of them fail."""
    self._apply(
      dropped(
        lose(self.master, self.spec, segment, self.layout.block_bytes),
        self.backend.now_s(),
      )
    )

  @property
  def idle(self) -> bool:
    return not self._runs and not self._works

  def step(self, until_s: float | None) -> list[Event]:
    """Waits for something to happen, at most to `until_s`; returns events.

    Where a submit or cancel has caused events already, it does not wait.
    """
    deadline_s = self._next_deadline()
    if self._events:
      until_s = self.backend.now_s()
    elif deadline_s is not None:
      until_s = deadline_s if until_s is None else min(until_s, deadline_s)
    for completion in self.backend.wait(until_s):
      self._complete(completion)
    self._expire(self.backend.now_s())
    self._reap(self.backend.now_s())
    events, self._events = self._events, []
    return events

  def check(self) -> None:
    """Raises AssertionError if pools, store or works disagree."""
    self.master.check()
    for instance in (*self.prefill.values(), *self.decode.values()):
      instance.check()
    if self.idle:
      for instance in (*self.prefill.values(), *self.decode.values()):
        assert instance.is_free, instance.name

  # Effects and completions.

  def _apply(self, effects: Iterable) -> None:
    for effect in effects:
      match effect:
        case Start(work):
          self._works.start(work)
        case Stop(work):
          self._works.stop(work)
        case Drop(replicas):
          self.backend.drop(replicas)
        case _:
          self._events.append(effect)
          if isinstance(effect, (Finished, Failed, Cancelled, RejectedLate)):
            self._end(effect)

  def _complete(self, completion: Completion) -> None:
    work = self._works.completed(completion)
    handler = {
      'fetch': self._on_fetch,
      'chunk': self._on_chunk,
      'put': self._on_put,
      'handoff': self._on_handoff,
      'decode': self._on_decode,
      'copy': self._on_copies,
    }[work.step]
    handler(work, completion)
    if work.run is not None:
      self._release(work.run)

  def _on_fetch(self, work: Work, completion: Completion) -> None:
    self._apply(
      self.prefill[work.instance].on_fetch(work, completion, completion.time_s)
    )

  def _on_put(self, work: Work, completion: Completion) -> None:
    store = self._store_of(work)
    self._apply(store.on_put(work, completion, completion.time_s))

  def _on_copies(self, work: Work, completion: Completion) -> None:
    store = self._store_of(work)
    self._apply(store.on_copies(work, completion, completion.time_s))

  def _store_of(self, work: Work) -> InstanceStore:
    store = self.prefill[work.instance].store
    assert store is not None, work
    return store

  def _on_chunk(self, work: Work, completion: Completion) -> None:
    run, chunk = work.run, work.payload
    assert run is not None and isinstance(chunk, PrefillChunk)
    self._apply(
      self.prefill[work.instance].on_chunk(work, completion, completion.time_s)
    )
    if run.ended:
      return
    if why := failed(completion):
      self._fail(run, completion.time_s, f'prefill: {why}')
    elif chunk.sampling is not None:
      self._prefill_done(run, completion)

  def _prefill_done(self, run: Run, completion: Completion) -> None:
    time_s, start_s = completion.time_s, run.prefill_start_s
    assert start_s is not None
    self._apply(
      [
        PrefillDone(
          time_s,
          *run.key,
          run.placement.prefill,
          start_s,
          run.computed_tokens
          - run.loaded_blocks * self.layout.block_size_tokens,
          run.prefill_s,
        )
      ]
    )
    decode = self.decode[run.placement.decode]
    if not decode.accepts(run):
      self._apply(
        [RejectedLate(time_s, *run.key, decode.name, 'tbt', run.prefill_s)]
      )
      return
    token = completion.token
    run.state = 'transferring'
    self._apply(
      decode.emit(
        run,
        RowTokens(
          *run.key,
          TokenSegment(time_s, 0.0, 1),
          () if token is None else (token,),
        ),
      )
    )
    self._try_join(run, time_s)

  def _on_handoff(self, work: Work, completion: Completion) -> None:
    run = work.run
    assert run is not None
    run.handoffs_open -= 1
    if run.ended:
      return
    if why := failed(completion):
      self._fail(run, completion.time_s, f'handoff: {why}')
    else:
      self._try_join(run, completion.time_s)

  def _try_join(self, run: Run, time_s: float) -> None:
    if run.state == 'transferring' and not run.handoffs_open:
      self._apply([KVArrived(time_s, *run.key, run.placement.decode)])
      self._apply(self.decode[run.placement.decode].join(run))

  def _on_decode(self, work: Work, completion: Completion) -> None:
    decode = self.decode[work.instance]
    runs = decode.runs
    self._apply(decode.on_decode(completion))
    if not completion.done:
      return
    if why := failed(completion):
      for run in runs:
        if not run.ended:
          self._fail(run, completion.time_s, f'decode: {why}')
    for run in runs:
      self._release(run)
    self._apply(decode.advance())

  # Ends.

  def _fail(self, run: Run, time_s: float, reason: str) -> None:
    self._apply([Failed(time_s, *run.key, run.placement.prefill, reason)])

  def _end(self, event: RequestEvent) -> None:
    """A run's last event was emitted: it leaves every queue."""
    run = self._runs[event.request_id, event.attempt]
    assert not run.ended, run.key
    run.state = 'ended'
    if not isinstance(event, Finished):
      self._works.stop_all_of(run)
    self._apply(self.prefill[run.placement.prefill].leave(run))
    self._apply(self.decode[run.placement.decode].leave(run))
    self._release(run)
    self._start_next(run.placement.prefill)  # it may have been the first

  def _release(self, run: Run) -> None:
    """Frees pages that nothing uses and lets in who waited for them."""
    prefill, decode = run.placement.prefill, run.placement.decode
    waiting: set[str] = set()
    if self.decode[decode].release(run):
      waiting |= self._held_back.pop(decode, set())
    freed, effects = self.prefill[prefill].release(run, self.backend.now_s())
    self._apply(effects)
    if freed:
      waiting.add(prefill)
    if run.ended and not run.prefill_pages and not run.decode_pages:
      self._runs.pop(run.key, None)
    for name in sorted(waiting):
      self._start_next(name)

  def _start_next(self, name: str) -> None:
    self._apply(
      self.prefill[name].start_next(
        lambda run: self._reserve(name, run), self.backend.now_s()
      )
    )

  def _reserve(self, name: str, run: Run) -> bool:
    """Reserves decode pages, or notes that prefill `name` waits for some."""
    decode = run.placement.decode
    if self.decode[decode].reserve(run):
      return True
    self._held_back.setdefault(decode, set()).add(name)
    return False

  def _next_deadline(self) -> float | None:
    while self._deadlines and self._deadlines[0][1] not in self._runs:
      heapq.heappop(self._deadlines)
    return self._deadlines[0][0] if self._deadlines else None

  def _expire(self, now_s: float) -> None:
    while (deadline_s := self._next_deadline()) is not None:
      if deadline_s > now_s:
        return
      run = self._runs[heapq.heappop(self._deadlines)[1]]
      if not run.ended:
        self._fail(
          run,
          now_s,
          f'deadline while {run.state}: '
          f'request_timeout_s={self.spec.request_timeout_s}',
        )

  def _adopt(self) -> list[Event]:
    """Takes over what earlier processes left on the SSDs."""
    if not (self.spec.ssd_bytes and self.spec.reuse):
      return []
    block_bytes, now_s = self.layout.block_bytes, self.backend.now_s()
    return [
      event
      for name in self.spec.prefill_names
      for event in stored(
        adopt(self.master, self.backend, ssd_segment(name), block_bytes), now_s
      )
    ]

  def _reap(self, now_s: float) -> None:
    """What time alone brings in the store, about once a second: dead puts
    end, hot blocks that lost a replica get one again."""
    if now_s - self._reaped_s >= REAP_EVERY_S:
      self._reaped_s = now_s
      self._apply(dropped(self.master.reap(now_s), now_s))
      self._apply(copying(self._client.repair(now_s), now_s))
