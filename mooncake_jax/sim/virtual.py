# SPDX-License-Identifier: Apache-2.0
"""VirtualBackend: work takes what a cost model says, on a virtual clock.

`wait` jumps to the next completion. The stages of a prefill instance
(`stages.py`) serve one chunk after another, transfers share each direction of
each link, lower priorities first and equal ones fairly (`links.py`,
`ports.py`), layer by layer where works follow each other; a decode work's steps
are computed in closed form, its step time taken as linear between its first and
last step (exact for costs linear in the context). No wall clock, no randomness:
the same calls give the same completions.

Differs from devices: a chunk that has begun is not cancelled, and a transfer
that has begun makes way for one of lower priority.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from itertools import compress

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import LinkUse
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.segments import medium
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.perturbed import PerturbedCost
from mooncake_jax.request import BlockKey
from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.contents import Contents
from mooncake_jax.sim.decoding import Decoding
from mooncake_jax.sim.decoding import decoding
from mooncake_jax.sim.links import Links
from mooncake_jax.sim.links import SimTransfer
from mooncake_jax.sim.remote_store import RemoteStore
from mooncake_jax.sim.shared_device import SharedDevice
from mooncake_jax.sim.stages import Pipeline
from mooncake_jax.sim.stages import SimChunk
from mooncake_jax.sim.works import SimWork


class VirtualBackend:
  """Backend on cost models; see the module's docstring."""

  def __init__(
    self,
    costs: CostModel,
    stage_layers: Sequence[int],
    *,
    instances: Mapping[str, CostModel] | None = None,
    partners: Mapping[str, str] | None = None,
    boundary_s: float = 0.0,
    store: RemoteStore | None = None,
    spoil: Callable[[Completion], Completion] = lambda completion: completion,
  ):
    """Starts at time 0 with `costs` as the truth.

    Args:
      stage_layers: layers of each stage of a prefill instance; a stage takes
        its share of a chunk's seconds.
      instances: the truth of those where `costs` is not. A link takes what
        the one whose end of it is busy says (`links.Lane`).
      partners: decode instances by the prefill instance they share devices
        with; see `shared_device.SharedDevice`.
      boundary_s: until the next stage has what a stage computed.
      store: what the Mooncake Store holds; None: nothing yet.
      spoil: makes another outcome of a completion, to study failures.
    """
    self._store = RemoteStore() if store is None else store
    self._costs = costs
    self._instances = dict(instances or {})
    self._own: dict[str, CostModel] = {}  # of those that were made slow
    self._stage_layers = tuple(stage_layers)
    self._num_layers = sum(stage_layers)
    self._contents = Contents(self._num_layers, self._store)
    self._boundary_s = boundary_s
    self._spoil = spoil
    self._ids = itertools.count()
    self._clock = Clock()
    partners = dict(partners or {})
    self._links = Links(
      self._costs_of, self._clock, self._settled, self._over, partners
    )
    self._pipelines: dict[str, Pipeline | SharedDevice] = {}
    # By the decode instance's name.
    self._shared: dict[str, SharedDevice] = {}
    for prefill, decode in partners.items():
      self._shared[decode] = self._shared_device(decode)
      self._pipelines[prefill] = self._shared[decode]
    self._works: dict[WorkId, SimWork] = {}
    self._decoding: dict[WorkId, Decoding] = {}
    self._done: list[Completion] = []
    # How works ended that did not complete, until whoever waits knows.
    self._failed: dict[WorkId, Status] = {}

  def now_s(self) -> float:
    return self._clock.now_s

  def prefill(
    self, instance: str, work: PrefillChunk, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    costs = self._costs_of(instance)
    seconds = costs.prefill_s(work.stop - work.start, work.start)
    chunk = SimChunk(next(self._ids), seconds, instance, self._num_layers)
    if self._begin(chunk, after):
      self._pipeline(instance).enter(chunk)
    return chunk.work_id

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    work_id = next(self._ids)
    if shared := self._shared.get(instance):
      shared.decode(work_id, batch, max_steps)
      return work_id
    costs = self._costs_of(instance)
    work = decoding(work_id, costs, batch, max_steps, self._clock.now_s)
    self._decoding[work_id] = work
    work.due = self._clock.at(work.end_s, self._decoded, work)
    return work_id

  def transfer(
    self,
    ops: Sequence[TransferOp],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    work_id, now_s = next(self._ids), self._clock.now_s
    work = SimTransfer(
      work_id, ops, priority, now_s, deadline_s, self._num_layers
    )
    if self._begin(work, after):
      if not work.num_open:
        self._limit(work, deadline_s)
      self._links.enter(work)
    return work.work_id

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    self._contents.drop(replicas)

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """Nothing outlives a simulation."""
    return []

  def probe(
    self,
    instance: str,
    segment: str,
    keys: tuple[BlockKey, ...],
    deadline_s: float,
  ) -> WorkId:
    assert medium(segment) == 'remote', (instance, segment)
    work_id, start_s = next(self._ids), self._clock.now_s
    answer_s = start_s + self._costs.transfer_s(0, 'remote_read')
    at_s, late = min(answer_s, deadline_s), answer_s > deadline_s
    self._clock.at(at_s, self._probed, work_id, start_s, keys, late)
    return work_id

  def slow(self, instance: str, compute: float, links: float) -> None:
    """See `backend.Slowable`."""
    own = self._own.setdefault(instance, self._costs_of(instance))
    costs = PerturbedCost(
      own, prefill_bias=compute, decode_bias=compute, transfer_bias=links
    )
    self._instances[instance] = costs
    self._links.forget_costs()
    if shared := self._shared.get(instance):
      shared.costs = costs

  def cancel(self, work_id: WorkId) -> None:
    if work_id in self._decoding:
      self._cut_short(self._decoding[work_id])
    for shared in self._shared.values():
      shared.cancel(work_id)
    work = self._works.get(work_id)
    if isinstance(work, SimChunk):
      if not self._pipeline(work.instance).has_begun(work):
        self._end_early(work, 'cancelled', '')
    elif isinstance(work, SimTransfer):
      self._end_early(work, 'cancelled', '')

  def wait(self, until_s: float | None) -> list[Completion]:
    self._failed.clear()
    self._begin_steps(until_s)
    self._clock.run(until_s, self._done)
    if not self._done and until_s is not None:
      self._clock.now_s = max(self._clock.now_s, until_s)
    completions, self._done = self._done, []
    return completions

  def progress(self) -> list[Completion]:
    works = [*self._decoding.values(), *self._shared.values()]
    told = [work.progress(self._clock.now_s) for work in works]
    return [completion for completion in told if completion is not None]

  def link_uses(self) -> dict[tuple[str, str], LinkUse]:
    return self._links.uses()

  def wake(self) -> None:
    """Nothing to wake: wait never blocks."""

  def _begin_steps(self, until_s: float | None) -> None:
    """Shared devices go on, if time passes: nothing else happens now."""
    if not self._shared or (
      until_s is not None and until_s <= self._clock.now_s
    ):
      return
    self._clock.run(self._clock.now_s, ())
    if not self._done:
      for shared in self._shared.values():
        shared.begin()

  def _costs_of(self, instance: str) -> CostModel:
    return self._instances.get(instance, self._costs)

  # Works that follow each other.

  def _begin(self, work: SimWork, after: tuple[WorkId, ...]) -> bool:
    """Notes what it follows; False if that has failed already."""
    self._works[work.work_id] = work
    if not after:
      return True
    lost = [a for a in after if a in self._failed]
    if lost:
      self._end_early(work, 'failed', self._why(lost[0]))
      return False
    work.after = tuple([self._works[a] for a in after if a in self._works])
    work.num_open = len(work.after)
    for ahead in work.after:
      ahead.followers.append(work)
      if isinstance(ahead, SimTransfer) and len(ahead.followers) == 1:
        self._links.watch(ahead)
    return True

  def _settled(self, work: SimWork) -> None:
    """It is known when (more) layers of a work will be done."""
    for follower in work.followers:
      if follower.work_id not in self._works:
        continue  # it has failed with another that it followed
      if isinstance(follower, SimChunk):
        self._pipeline(follower.instance).poke()
      elif isinstance(follower, SimTransfer):
        self._links.poke(follower)

  def _end(self, completion: Completion) -> None:
    """A prefill or transfer ends; those that follow it may, or must."""
    completion = self._spoil(completion)
    work = self._works.pop(completion.work_id)
    self._done.append(completion)
    if completion.status != 'completed':
      self._failed[work.work_id] = completion.status
    for follower in work.followers:
      if follower.work_id not in self._works:
        continue
      follower.num_open -= 1
      if completion.status != 'completed':
        self._end_early(follower, 'failed', self._why(work.work_id))
      elif not follower.num_open and follower.is_over:
        self._close(follower)
      elif not follower.num_open and isinstance(follower, SimTransfer):
        # What it waited for does not count against its deadline.
        waited_s = self._clock.now_s - follower.begun_s
        self._limit(follower, follower.deadline_s + waited_s)
    work.let_go()

  def _why(self, work_id: WorkId) -> str:
    return f'it follows work {work_id}, which ended as {self._failed[work_id]}'

  def _limit(self, work: SimTransfer, deadline_s: float) -> None:
    """If it is still under way then, it ends."""
    if deadline_s <= self._clock.now_s and not work.num_moving:
      return
    due = self._clock.at(deadline_s, self._end_early, work, 'timeout', 'late')
    work.due.append(due)

  def _over(self, work: SimWork) -> None:
    """All of it was computed or has arrived."""
    work.is_over = True
    if not work.num_open:
      self._close(work)

  def _close(self, work: SimWork) -> None:
    """It ends."""
    if isinstance(work, SimTransfer):
      self._moved(work)
    elif isinstance(work, SimChunk):
      started_s, spans = work.spans[0][0], tuple(work.spans)
      self._end(
        Completion(
          work.work_id, 'completed', started_s, self._clock.now_s, spans=spans
        )
      )

  def _end_early(self, work: SimWork, status: Status, why: str) -> None:
    """Ends a work before its time, and gives back what it would take."""
    now_s = start_s = self._clock.now_s
    op_status: tuple[Status, ...] = ()
    if isinstance(work, SimChunk):
      self._pipeline(work.instance).remove(work)
      start_s = work.spans[0][0] if work.spans else now_s
    elif isinstance(work, SimTransfer):
      start_s, op_status = work.start_s, self._left_undone(work, status)
      self._links.remove(work)
    self._end(
      Completion(
        work.work_id,
        status,
        min(start_s, now_s),
        now_s,
        why,
        op_status=op_status,
      )
    )

  def _left_undone(
    self, work: SimTransfer, status: Status
  ) -> tuple[Status, ...]:
    """A status an op: what has arrived stays, but behind a work that failed."""
    if status == 'failed':
      return ('cancelled',) * len(work.ops)
    there = self._links.arrived(work)
    moved = iter(self._contents.move([*compress(work.ops, there)]))
    return tuple([next(moved) if each else status for each in there])

  def _moved(self, work: SimTransfer) -> None:
    """Bytes arrived; reads of what is not there fail."""
    self._links.remove(work)
    status = self._contents.move(work.ops)
    bad = 'failed' in status
    self._end(
      Completion(
        work.work_id,
        'failed' if bad else 'completed',
        min(work.start_s, self._clock.now_s),
        self._clock.now_s,
        "an op is 'failed'" if bad else '',
        op_status=status,
      )
    )

  def _probed(
    self,
    work_id: WorkId,
    start_s: float,
    keys: tuple[BlockKey, ...],
    late: bool,
  ) -> None:
    missing = (i for i, key in enumerate(keys) if not self._store.has(key))
    completion = Completion(
      work_id,
      'timeout' if late else 'completed',
      start_s,
      self._clock.now_s,
      present=0 if late else next(missing, len(keys)),
    )
    self._done.append(self._spoil(completion))

  def _shared_device(self, decode: str) -> SharedDevice:
    return SharedDevice(
      self._clock,
      self._costs_of(decode),
      self._num_layers,
      self._settled,
      self._over,
      self._emitted,
    )

  def _pipeline(self, instance: str) -> Pipeline | SharedDevice:
    if instance not in self._pipelines:
      self._pipelines[instance] = Pipeline(
        self._clock,
        self._stage_layers,
        self._boundary_s,
        self._settled,
        self._over,
      )
    return self._pipelines[instance]

  # Decoding.

  def _decoded(self, work: Decoding) -> None:
    del self._decoding[work.work_id]
    work.due = None
    self._emitted(work.completion())

  def _emitted(self, completion: Completion) -> None:
    """A decode work ends, or goes on."""
    self._done.append(self._spoil(completion))

  def _cut_short(self, work: Decoding) -> None:
    """Ends a decode work at the next step boundary."""
    if work.cut_short(self._clock.now_s):
      assert work.due is not None
      self._clock.drop(work.due)
      work.due = self._clock.at(work.end_s, self._decoded, work)
