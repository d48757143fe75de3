# SPDX-License-Identifier: Apache-2.0
"""How runs move: effects carried out, completions turned into new work.

Each work under way belongs to a run or to a decode batch; a run's pages are
freed when it has ended and no work touches them, so nothing late lands in
reused pages.
"""

from collections.abc import Callable
from functools import partial
from typing import TypedDict

from mooncake_jax.backend import Backend
from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import Cancelled
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.instance.decode import DecodeInstance
from mooncake_jax.instance.prefill import PrefillInstance
from mooncake_jax.instance.run import Drop
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import failed
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import RunKey
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Stop
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.run import WorkStep
from mooncake_jax.instance.storing import InstanceStore
from mooncake_jax.instance.turn import Turn
from mooncake_jax.instance.works import work_done
from mooncake_jax.instance.works import Works
from mooncake_jax.request import Emitted
from mooncake_jax.request import TokenSegment

# Steps that timelines show.
TIMELINE = ('chunk', 'fetch', 'put', 'handoff', 'put_output')


class _Spent(TypedDict):
  """See `events.Stopped`."""

  computed_tokens: int
  prefill_s: float


class Flow:
  """All runs of a cluster and the works under way for them."""

  def __init__(
    self,
    spec: ClusterSpec,
    layout: KVLayout,
    backend: Backend,
    prefill: dict[str, PrefillInstance],
    decode: dict[str, DecodeInstance],
  ):
    """Starts with no run; the instances are the cluster's, by name."""
    self._layout = layout
    self._stores_output = spec.store_output
    self._backend = backend
    self.prefill = prefill
    self.decode = decode
    self._works = Works(spec, backend)
    self._held_back: dict[str, set[str]] = {}
    self._woken: set[str] = set()
    self._events: list[Event] = []
    self.runs: dict[RunKey, Run] = {}
    self._last: dict[str, RunKey] = {}
    self.turn = Turn(self._go_on)
    self.tells_works = True
    self._handlers: dict[WorkStep, Callable[[Work, Completion], None]] = {
      'probe': self._on_probe,
      'fetch': self._on_fetch,
      'chunk': self._on_chunk,
      'put': self._on_put,
      'handoff': self._on_handoff,
      'put_output': self._on_put,
      'decode': self._on_decode,
      'copy': self._on_copies,
    }

  @property
  def idle(self) -> bool:
    return not self.runs and not self._works

  @property
  def has_events(self) -> bool:
    return bool(self._events)

  def take_events(self) -> list[Event]:
    """What happened since the last call, in order."""
    events, self._events = self._events, []
    return events

  def begin(self, run: Run) -> None:
    """Queues a new run at its prefill instance."""
    assert run.key not in self.runs, run.key
    self.runs[run.key] = run
    self._last[run.request.request_id] = run.key
    name = run.placement.prefill
    self.apply(self.prefill[name].enqueue(run, self._backend.now_s()))
    self._start_next(name)

  def last_try(self, request_id: str) -> Run | None:
    """The run of a request that is still there; earlier ones have ended."""
    key = self._last.get(request_id)
    return None if key is None else self.runs.get(key)

  def refuse(self, run: Run, reason: str, blame: str) -> None:
    """Ends a new run that can't begin, for an instance's fault."""
    now_s = self._backend.now_s()
    self._events.append(Failed(now_s, *run.key, blame, reason, True))

  def reads_from(self, instance: str) -> bool:
    """Whether a work under way reads blocks of the instance's segments."""
    return self._works.reads_from(instance)

  def needs(self, instance: str) -> bool:
    """Whether a work under way is the instance's, or reads there."""
    return self._works.needs(instance)

  def cancel(self, run: Run) -> None:
    """Ends a run whose client went away."""
    now_s, name = self._backend.now_s(), run.placement.prefill
    self.apply([Cancelled(now_s, *run.key, name, **self._spent(run))])

  def fail(
    self, run: Run, time_s: float, reason: str, blame: str | None = None
  ) -> None:
    """Ends a run that can't go on, for an instance's fault or its own."""
    name = blame or run.placement.prefill
    retryable, spent = blame is not None, self._spent(run)
    self.apply([Failed(time_s, *run.key, name, reason, retryable, **spent)])

  def _spent(self, run: Run) -> _Spent:
    """What a run that ends now computed and no event has told of."""
    if run.prefilled:
      return _Spent(computed_tokens=0, prefill_s=0.0)
    return _Spent(
      computed_tokens=run.own_tokens(self._layout), prefill_s=run.prefill_s
    )

  def apply(self, effects: Effects) -> None:
    """Carries out what instances and store caused, in order."""
    if not effects:
      return
    with self.turn:
      for effect in effects:
        if type(effect) is Start:  # told apart often: by type, not by class
          self._works.start(effect.work)
        elif type(effect) is Stop:
          self._works.stop(effect.work)
        elif type(effect) is Drop:
          self._backend.drop(effect.replicas)
        else:
          self._events.append(effect)
          if isinstance(effect, ENDS):
            self._end(effect)

  def complete(self, completion: Completion) -> None:
    """Moves on what waited for a work that ended or made progress."""
    with self.turn:
      work = self._works.completed(completion)
      if self.tells_works and work.run is not None and work.step in TIMELINE:
        self._events.append(work_done(work, work.run, completion))
      on_end = self._on_void if work.is_void else self._handlers[work.step]
      on_end(work, completion)
      if work.run is not None:
        self._release(work.run)

  def _on_probe(self, work: Work, completion: Completion) -> None:
    self.apply(
      self.prefill[work.instance].on_probe(work, completion, completion.time_s)
    )
    self._start_next(work.instance)

  def _on_fetch(self, work: Work, completion: Completion) -> None:
    self.apply(
      self.prefill[work.instance].on_fetch(work, completion, completion.time_s)
    )

  def _on_void(self, work: Work, completion: Completion) -> None:
    self.apply(
      self.prefill[work.instance].on_void(work, completion, completion.time_s)
    )

  def _on_put(self, work: Work, completion: Completion) -> None:
    store = self._store_of(work)
    self.apply(store.on_put(work, completion, completion.time_s))

  def _on_copies(self, work: Work, completion: Completion) -> None:
    store = self._store_of(work)
    self.apply(store.on_copies(work, completion, completion.time_s))

  def _store_of(self, work: Work) -> InstanceStore:
    store = self.prefill[work.instance].store
    assert store is not None, work
    return store

  def _on_chunk(self, work: Work, completion: Completion) -> None:
    run, chunk = work.run, work.payload
    assert run is not None and isinstance(chunk, PrefillChunk)
    self.apply(
      self.prefill[work.instance].on_chunk(work, completion, completion.time_s)
    )
    if run.ended:
      return
    if why := failed(completion):
      self.fail(
        run, completion.time_s, f'prefill: {why}', run.placement.prefill
      )
    elif chunk.sampling is not None:
      self._prefill_done(run, completion)

  def _prefill_done(self, run: Run, completion: Completion) -> None:
    time_s, start_s = completion.time_s, run.prefill_start_s
    assert start_s is not None
    self.apply(
      [
        PrefillDone(
          time_s,
          *run.key,
          run.placement.prefill,
          start_s,
          run.own_tokens(self._layout),
          run.prefill_s,
        )
      ]
    )
    decode = self.decode[run.placement.decode]
    if not decode.accepts(run):
      self.apply(
        [RejectedLate(time_s, *run.key, decode.name, 'tbt', run.prefill_s)]
      )
      return
    token = completion.token
    run.state = 'transferring'
    self.apply(
      decode.emit(
        [run],
        Emitted(
          (run.key,),
          TokenSegment(time_s, 0.0, 1),
          () if token is None else (token,),
          completion.logprobs,
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
      self.fail(run, completion.time_s, f'handoff: {why}', run.placement.decode)
    else:
      self._try_join(run, completion.time_s)

  def _try_join(self, run: Run, time_s: float) -> None:
    if run.state == 'transferring' and not run.handoffs_open:
      self.apply([KVArrived(time_s, *run.key, run.placement.decode)])
      self.apply(self.decode[run.placement.decode].join(run))
      self.turn.stir(run.placement.decode)

  def _on_decode(self, work: Work, completion: Completion) -> None:
    decode = self.decode[work.instance]
    runs = decode.runs
    self.apply(decode.on_decode(completion))
    if not completion.done:
      return
    if why := failed(completion):
      for run in runs:
        if not run.ended:
          self.fail(
            run, completion.time_s, f'decode: {why}', run.placement.decode
          )
    for run in runs:
      self._release(run)
    self.turn.stir(decode.name)

  def _go_on(self, name: str) -> None:
    """Starts the next steps, once it is known who has to make room."""
    decode = self.decode[name]
    while (run := decode.victim()) is not None:
      self._preempt(run, self._backend.now_s())
    self.apply(decode.advance())

  # Preemption.

  def _preempt(self, run: Run, time_s: float) -> None:
    """Puts a run's KVCache to the store; it waits until it can go on.

    Where its prefill instance is gone it is placed anew, from the beginning.
    """
    prefill, decode = run.placement.prefill, self.decode[run.placement.decode]
    if self.prefill[prefill].is_gone:
      self.fail(run, time_s, f'preempted, and {prefill} was lost', prefill)
      return
    run.state = 'preempted'
    self.apply([*decode.leave(run), Preempted(time_s, *run.key, decode.name)])
    self._put_output(run, time_s)
    self._release(run)

  def _put_output(self, run: Run, time_s: float) -> None:
    store = self.prefill[run.placement.prefill].store
    if store is not None:
      self.apply(store.store_output(run, time_s))

  def _resume(self, run: Run) -> None:
    """Queues a preempted run again: nothing touches its pages any more."""
    leg = run.next_leg(self._layout.block_size_tokens)
    self.runs[run.key] = leg
    name = leg.placement.prefill
    self.apply(self.prefill[name].enqueue(leg, self._backend.now_s()))
    self._start_next(name)

  # Ends.

  def _end(self, event: RequestEvent) -> None:
    """A run's last event was emitted: it leaves every queue."""
    run = self.runs[event.request_id, event.attempt]
    assert not run.ended, run.key
    has_decoded, run.state = run.state == 'decoding', 'ended'
    if not isinstance(event, Finished):
      self._works.stop_all_of(run)
    elif has_decoded and self._stores_output and run.names_output:
      self._put_output(run, event.time_s)
    self.apply(self.prefill[run.placement.prefill].leave(run, event.time_s))
    self.apply(self.decode[run.placement.decode].leave(run))
    self._release(run)
    self._start_next(run.placement.prefill)  # it may have been the first

  def _release(self, run: Run) -> None:
    """Frees pages that nothing uses and lets in who waited for them."""
    if not run.may_give_pages:
      return
    prefill, decode = run.placement.prefill, run.placement.decode
    waiting: set[str] = set()
    if self.decode[decode].release(run):
      self.turn.stir(decode)
      self.apply(self.decode[decode].came_free())
      waiting |= self._held_back.pop(decode, set())
    freed, effects = self.prefill[prefill].release(run, self._backend.now_s())
    self.apply(effects)
    if freed:
      waiting.add(prefill)
    if run.ended and not run.works and not run.decode_uses:
      assert not run.prefill_pages and not run.decode_pages, run.key
      self.runs.pop(run.key, None)
      if self._last.get(run.key[0]) == run.key:
        del self._last[run.key[0]]
    elif run.state == 'preempted' and not run.works:
      self._resume(run)
    if waiting:
      for name in sorted(waiting & self.prefill.keys()):
        self._start_next(name)

  def _start_next(self, name: str) -> None:
    names = {name}
    while names:
      for each in sorted(names) if len(names) > 1 else names:
        if each not in self.prefill:
          continue
        self.apply(
          self.prefill[each].start_next(
            partial(self._reserve, each), self._backend.now_s()
          )
        )
      names = self._woken
      if names:
        self._woken = set()

  def _reserve(self, name: str, run: Run) -> bool:
    """Reserves decode pages, or notes that prefill `name` waits for some."""
    decode = run.placement.decode
    if self.decode[decode].reserve(run):
      # Others had to wait for it.
      self._woken |= self._held_back.pop(decode, set())
      return True
    self._held_back.setdefault(decode, set()).add(name)
    return False
