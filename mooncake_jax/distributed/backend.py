# SPDX-License-Identifier: Apache-2.0
"""RayBackend: instances in processes of their own, driven from one loop.

A work goes to the worker whose instance it is for; a transfer between two
instances has a leg at each, and its bytes go from worker to worker. What a
work is `after` is seen to by the worker that has all of it, layer by layer;
what ends elsewhere is waited for here. Works of a worker that is lost fail.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
import itertools
import math
import time

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import LinkUse
from mooncake_jax.backend import MemberChange
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import owner
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.distributed.crew import Crew
from mooncake_jax.distributed.handover import Heard
from mooncake_jax.distributed.legs import by_instance
from mooncake_jax.distributed.legs import legs_of
from mooncake_jax.distributed.member import Joined
from mooncake_jax.distributed.member import Lost
from mooncake_jax.distributed.member import News
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.work import failed
from mooncake_jax.distributed.work import Following
from mooncake_jax.distributed.work import Work
from mooncake_jax.engine.progress import MAX_FAILED
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.page_copies import copy_sizes


class RayBackend:
  """`Backend` over processes; a context manager that ends them."""

  def __init__(
    self,
    layout: KVLayout,
    workers: Sequence[ProcessSpec],
    spec: RaySpec,
    clock: Callable[[], float] = time.perf_counter,
    absent: Collection[str] = (),
    on_start: Callable[[int, int], None] = lambda there, wanted: None,
  ):
    """Starts the instances' processes; returns when all are compiled.

    Args:
      absent: instances that `bring` may start later.
      on_start: told how many processes of how many are there.

    Raises:
      RuntimeError: an instance can't start.
    """
    self.layout = layout
    self._clock = clock
    self._start_s = clock()
    self._sizes = copy_sizes(layout)
    self._ids = itertools.count()
    # None that an earlier driver gave: its parts may still be on their way.
    self._numbers = itertools.count(time.time_ns() // 1000)
    self._works: dict[WorkId, Work] = {}
    self._failed: dict[WorkId, str] = {}
    self._following = Following()
    self._told: dict[str, list[c.Command]] = {}
    self._heard = Heard()
    self._ready: list[Completion] = []
    self._changes: list[MemberChange] = []
    self._instances = {w.name: w for w in workers}
    self._sharing = [w.name for w in workers if w.can_be('prefill')]
    self._absent = frozenset(absent)
    self._start_limit_s = spec.start_s
    self.crew = Crew(workers, spec, absent, on_start)
    self._there = {  # why it is not, by instance
      name: f'{name} is absent' if name in self._absent else ''
      for name in self._instances
    }
    for name, address in self.crew.addresses.items():
      self._tell_others(name, c.Lead(name, address))
      self._tell(name, c.Begin(next(self._numbers)))
    self.restart_clock()

  def __enter__(self) -> 'RayBackend':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def now_s(self) -> float:
    """Seconds from the start of the run."""
    return self._clock() - self._start_s

  def restart_clock(self, at_s: float = 0.0) -> None:
    """Makes now `at_s` of the run. Only while no work is under way.

    Instances that an earlier run lost or let go come back, and those that
    joined in it go.

    Raises:
      RuntimeError: one does not come.
    """
    assert not self._works, 'works are under way'
    self._muster()
    self._start_s = self._clock() - at_s
    for name in self._there:
      self._tell(name, c.RestartClock(self._start_s))
    self._flush()

  def prefill(
    self, instance: str, work: PrefillChunk, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    """See `Backend`."""
    work_id = next(self._ids)
    return self._open_at(instance, c.Prefill(work_id, work, after), after)

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    """See `Backend`."""
    work_id = next(self._ids)
    return self._open_at(instance, c.Decode(work_id, batch, max_steps))

  def transfer(
    self,
    ops: Sequence[TransferOp],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    """See `Backend`."""
    work_id = next(self._ids)
    legs = legs_of(ops, self._numbers, self._sizes)
    told: dict[str, c.Command] = {}
    for name, leg in legs.items():
      self._check(name)
      # What only arrives is not late before it was sent: that its source sees.
      first_s = math.inf if after and leg.numbers else deadline_s
      own = () if leg.only_receives else after
      told[name] = c.Transfer(work_id, leg.ops, priority, first_s, own)
    return self._open(Work(work_id, told, legs, len(ops)), after)

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    """See `Backend`."""
    for name, gone in by_instance(replicas, self._sharing).items():
      self._tell(name, c.Forget(tuple(gone)))

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend`."""
    self._check(owner(segment))
    return self.crew.adopt(segment)

  def probe(
    self,
    instance: str,
    segment: str,
    keys: tuple[BlockKey, ...],
    deadline_s: float,
  ) -> WorkId:
    """See `Backend`."""
    work_id = next(self._ids)
    return self._open_at(instance, c.Probe(work_id, segment, keys, deadline_s))

  def link_uses(self) -> dict[tuple[str, str], LinkUse]:
    """See `Backend`; ('wire', name) leads into another process.

    As instances told of late, at most a second ago while they answer. Of one
    that was lost, only what came since it is back.
    """
    return self.crew.link_uses(self._start_s)

  def holdings(self) -> dict[str, Holdings]:
    """What the processes hold that are there and answer; waits for them."""
    return self.crew.ask('holdings', names=[*self._there])

  def devices(self) -> list[DeviceName]:
    """See `OnDevices`: of the processes that are there and answer."""
    told = self.crew.ask('devices', names=[*self._there])
    return [device for devices in told.values() for device in devices]

  def cancel(self, work_id: WorkId) -> None:
    """See `Backend`."""
    if (work := self._works.get(work_id)) is None:
      return
    if not work.is_started:
      self._end_unstarted(work, 'cancelled')
      return
    for name in work.left:
      self._tell(name, c.Cancel(work_id))

  def wait(self, until_s: float | None) -> list[Completion]:
    """See `Backend`.

    Raises:
      RuntimeError: what listens to the workers is no more.
    """
    # All that follows from what was heard before has been told by now.
    for name, number in self._heard.due(
      None if not self._works else self._told
    ):
      self._tell(name, c.Heard(number))
    while True:
      self._flush()
      news, woken = self.crew.take(self._patience_s(until_s))
      for name, each in news:
        self._hear(name, each)
      if self._ready or self._changes or woken or self._is_over(until_s):
        break
    self._flush()
    ready, self._ready = self._ready, []
    return ready

  def member_changes(self) -> list[MemberChange]:
    """See `Changing`."""
    changes, self._changes = self._changes, []
    return changes

  def bring(self, instance: str) -> None:
    """See `Changing`."""
    self._check(instance)
    self.crew.bring(instance)

  def dismiss(self, instance: str) -> None:
    """See `Changing`."""
    self._check(instance)
    self.crew.dismiss(instance)

  def can_be(self, instance: str, role: str) -> bool:
    """See `Sized`."""
    self._check(instance)
    return self._instances[instance].can_be(role)

  def wake(self) -> None:
    """See `Backend`. Any thread may call."""
    self.crew.wake()

  def close(self) -> None:
    """Ends all processes; works under way are dropped."""
    self.crew.close()

  def _open_at(
    self, instance: str, command: c.Starting, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    """`_open` of a work of one instance."""
    self._check(instance)
    return self._open(Work(command.work_id, {instance: command}), after)

  def _open(self, work: Work, after: tuple[WorkId, ...]) -> WorkId:
    """Starts a work, or notes what it waits for first."""
    work.opened_s = self.now_s()
    self._works[work.work_id] = work
    if error := next((self._failed[i] for i in after if i in self._failed), ''):
      self._end_unstarted(work, 'failed', error)
      return work.work_id
    for ahead in filter(None, map(self._works.get, after)):
      self._following.note(work, ahead)
    if not work.waits:
      self._start(work)
    return work.work_id

  def _start(self, work: Work) -> None:
    now_s, work.is_started = self.now_s(), True
    if work.has_waited:
      work.put_off(now_s - work.opened_s)
    if not work.commands:
      self._finish(work, Completion(work.work_id, 'completed', now_s, now_s))
    for name, command in work.commands.items():
      if why := self._there[name]:
        self._leg_ended(work, name, failed(work.work_id, now_s, why))
      else:
        self._tell(name, command)

  def _end_unstarted(self, work: Work, status: Status, error: str = '') -> None:
    self._finish(work, work.unstarted(self.now_s(), status, error))

  def _leg_ended(self, work: Work, name: str, completion: Completion) -> None:
    """An instance is through with its share of a work."""
    if name in work.ends:
      return
    if numbers := work.end(name, completion):
      for other in work.left:
        self._tell(other, c.Miss(numbers, f'{name}: {completion.why}'))
    if work.is_over:
      self._finish(work, work.completion())

  def _finish(self, work: Work, completion: Completion) -> None:
    """The work has ended; those that waited for it go on, or don't."""
    del self._works[work.work_id]
    self._ready.append(completion)
    error = ''
    if completion.status != 'completed':
      error = f'work {work.work_id}, which it waits for, {completion.why}'
      self._failed[work.work_id] = error
      if len(self._failed) > MAX_FAILED:
        del self._failed[next(iter(self._failed))]
    for other in self._following.ended(work.work_id):
      if other.work_id not in self._works:
        continue  # it was cancelled, or another one failed it
      if other.is_over:
        self._finish(other, other.completion())
      elif error and not other.is_started:
        self._end_unstarted(other, 'failed', error)
      elif not other.is_started and not other.waits:
        self._start(other)

  def _muster(self) -> None:
    """Waits until exactly those are there that are at the start."""
    for name in self._there:
      (self.crew.dismiss if name in self._absent else self.crew.bring)(name)
    until_s = time.monotonic() + self._start_limit_s
    while wrong := [
      name
      for name, why in self._there.items()
      if bool(why) != (name in self._absent)
    ]:
      if time.monotonic() > until_s:
        raise RuntimeError(f'{wrong} did not come or go')
      for name, news in self.crew.take(1.0)[0]:
        self._hear(name, news)
    self._changes.clear()

  def _hear(self, name: str, news: News) -> None:
    match news:
      case c.Report():
        self._heard.report(name, news.number)
        for completion in news.completions:
          self._completed(name, completion)
      case Lost():
        self._lose(name, news.why)
      case Joined():
        self._there[name] = ''
        self._tell(name, c.Begin(next(self._numbers)))
        self._tell(name, c.RestartClock(self._start_s))
        self._tell_others(name, c.Lead(name, news.address))
        for other, address in self.crew.addresses.items():
          if other != name:
            self._tell(name, c.Lead(other, address))
        self._changes.append(MemberChange(name, is_there=True))

  def _completed(self, name: str, completion: Completion) -> None:
    work = self._works.get(completion.work_id)
    if work is None or name in work.ends:
      return  # of a process that was given up meanwhile
    if completion.done:
      self._leg_ended(work, name, completion)
    else:
      self._ready.append(completion)

  def _lose(self, name: str, why: str) -> None:
    """All works that need the instance fail."""
    self._there[name] = why
    self._told.pop(name, None)
    self._heard.lost(name)
    self._changes.append(MemberChange(name, is_there=False))
    self._tell_others(name, c.Lead(name, None))
    for work in [*self._works.values()]:
      if work.is_started and name in work.left:
        self._leg_ended(work, name, failed(work.work_id, self.now_s(), why))

  def _tell(self, name: str, command: c.Command) -> None:
    """Tells an instance that is there, at the next flush."""
    if not self._there[name]:
      self._told.setdefault(name, []).append(command)

  def _tell_others(self, name: str, command: c.Command) -> None:
    for other in self._there:
      if other != name:
        self._tell(other, command)

  def _flush(self) -> None:
    told, self._told = self._told, {}
    self.crew.tell(told)

  def _check(self, name: str) -> None:
    if name not in self._there:
      raise ValueError(f'no instance {name!r} among {[*self._there]}')

  def _patience_s(self, until_s: float | None) -> float:
    if self._ready or self._changes:
      return 0.0
    if until_s is None:
      return math.inf if self._works else 0.0
    return until_s - self.now_s()

  def _is_over(self, until_s: float | None) -> bool:
    if until_s is None:
      return not self._works
    return self.now_s() >= until_s
