# SPDX-License-Identifier: Apache-2.0
"""Instances that come, go and change, and blocks that are sent around.

Values in, events out: what is asked for here begins at once and is told of by
events from `Cluster.step`. An instance that is draining gets no new run, ends
those it has, sends its hot blocks to others and is gone; one that is lost is
gone at once, with its blocks and the runs that needed it. Others go on.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from typing import Literal

from mooncake_jax.backend import Backend
from mooncake_jax.backend import Changing
from mooncake_jax.backend import Sized
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import MEDIA
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import InstanceDraining
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.instance.decode import DecodeInstance
from mooncake_jax.instance.flow import Flow
from mooncake_jax.instance.prefill import PrefillInstance
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.telling import adopted
from mooncake_jax.instance.telling import copying
from mooncake_jax.instance.telling import dropped
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.store.client import StoreClient
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.setup import mount
from mooncake_jax.store.setup import segments_of
from mooncake_jax.store.setup import take_out

Role = Literal['prefill', 'decode']
# What a draining instance waits for: its runs, its copies, its readers.
Phase = Literal['runs', 'copies', 'readers']


class Members:
  """The instances of a cluster, as they come and go."""

  def __init__(
    self,
    spec: ClusterSpec,
    layout: KVLayout,
    client: StoreClient,
    flow: Flow,
    backend: Backend,
    prefill: Callable[[str], PrefillInstance],
    decode: Callable[[str], DecodeInstance],
  ):
    """Begins with all instances of the spec there but the absent ones.

    Args:
      prefill, decode: make an idle instance of a name.
    """
    self._spec = spec
    self._layout = layout
    self._client = client
    self._master = client.master
    self._flow = flow
    self._backend = backend
    self._make_prefill = prefill
    self._make_decode = decode
    self._becoming: dict[str, Role] = {}
    self._draining: dict[str, Phase] = {}
    self._gone = {*spec.absent}
    self._coming: set[str] = set()  # as processes that are being started
    # What lost ones may find again on their SSDs.
    self._left: dict[str, frozenset[BlockKey]] = {}
    self._changing = backend if isinstance(backend, Changing) else None
    for name in spec.absent:
      self._mark(name, is_gone=True)

  def refusal(self, placement: Placement) -> str:
    """The instance that takes no run that was placed so; '' if all do."""
    for name, role in (
      (placement.prefill, self._flow.prefill),
      (placement.decode, self._flow.decode),
    ):
      if name in self._gone or name in self._draining or name not in role:
        return name
    return ''

  def drain(self, name: str) -> None:
    """Lets an instance go when all its runs have ended.

    Raises:
      ValueError: there is no such instance.
    """
    if name in self._coming:
      self._coming.remove(name)
      self._let_go(name)
      return
    self._check_there(name)
    if name not in self._draining:
      self._draining[name] = 'runs'
      now_s = self._backend.now_s()
      self._flow.apply([InstanceDraining(now_s, name)])
    self.advance()

  def lose(self, name: str) -> None:
    """An instance is gone, with all it had; runs that need it fail.

    Raises:
      ValueError: there is no such instance.
    """
    self._check_there(name)
    self._forget(name)
    self._let_go(name)

  def _forget(self, name: str) -> None:
    """What it had is gone, and the runs that needed it."""
    self._draining.pop(name, None)
    self._becoming.pop(name, None)
    self._gone.add(name)
    self._left[name] = frozenset()
    self._mark(name, is_gone=True)
    with self._flow.turn:
      for run in [*self._flow.runs.values()]:
        if not run.ended and _needs(run, name):
          now_s = self._backend.now_s()
          self._flow.fail(run, now_s, f'{name} was lost', blame=name)
    self._close(name)

  def follow(self) -> None:
    """Loses and takes back instances as the backend does."""
    if self._changing is None:
      return
    for name, is_there in self._changing.member_changes():
      if is_there and name in self._gone:
        self._open(name)
      elif not is_there and name in self._there:
        if name in self._draining and name not in self._becoming:
          self._let_go(name)  # it was to go: it is not started again
        ssd = ssd_segment(name)
        has_ssd = ssd in self._master.segments()
        kept = frozenset(self._master.inventory(ssd) if has_ssd else ())
        self._forget(name)
        self._left[name] = kept

  def join(self, name: str) -> None:
    """An instance that is absent, lost or drained comes, with empty memory.

    A process is started first, and joins when it is there.

    Raises:
      ValueError: it is not gone.
    """
    if name not in self._gone:
      raise ValueError(f'instance={name!r} is not gone')
    if self._changing is not None:
      self._coming.add(name)
      self._changing.bring(name)
    else:
      self._open(name)

  def set_role(self, name: str, role: Role) -> None:
    """Drains an instance and makes it one of the other role, with empty memory.

    Raises:
      ValueError: it is not there, is leaving, is the last of its role, or is
        made for one role only.
    """
    if reason := self.role_refusal(name, role):
      raise ValueError(f'instance={name!r} {reason}')
    if name in self._coming:
      self._change(name, role)
    elif role != self._becoming.get(name, self._role(name)):
      self._becoming[name] = role
      self.drain(name)

  def role_refusal(self, name: str, role: Role) -> str:
    """Why an instance can't take the role now; '' if it can."""
    if name not in self._there | self._coming:
      return f'is not one of {sorted(self._there)}'
    if self._spec.colocated:
      return 'shares its devices'
    if role == self._becoming.get(name, self._role(name)):
      return ''
    sized = self._backend if isinstance(self._backend, Sized) else None
    if sized is not None and not sized.can_be(name, role):
      return 'is made for one role, see ClusterSpec.switchable'
    if name in self._draining:
      return 'is leaving'
    if name in self._coming or self._stay_without(name):
      return ''
    return 'is the last of its role'

  def replicate(self, keys: Iterable[BlockKey], src: str, dst: str) -> None:
    """Copies an instance's blocks to a segment, as far as there is room.

    Each from wherever the instance has it, but from a device.

    Raises:
      ValueError: an unknown instance or segment, or a device's.
    """
    self._check_segment(dst)
    if src not in (owners := {*map(owner, self._master.segments())}):
      raise ValueError(f'{src=} has no memory; these have: {sorted(owners)}')
    now_s = self._backend.now_s()
    tasks: list[CopyTask] = []
    evicted: list[Evicted] = []
    for key in keys:
      if (segment := self._source(key, src, dst)) is None:
        continue
      start = self._master.copy_start(key, segment, dst, now_s)
      evicted += start.evicted
      tasks += [start.task] if start.task is not None else []
    copies = self._client.copies(tuple(tasks), tuple(evicted))
    self._flow.apply(copying(self._master, copies, now_s))

  def drop(self, keys: Iterable[BlockKey], segment: str) -> None:
    """Takes blocks out of a segment, each as soon as nobody reads it there.

    Raises:
      ValueError: an unknown segment, or a device's.
    """
    self._check_segment(segment)
    now_s = self._backend.now_s()
    gone = [
      evicted
      for key in keys
      for evicted in self._master.drop(key, segment, now_s)
    ]
    self._flow.apply(dropped(self._master, gone, now_s))

  def advance(self) -> None:
    """Takes the next steps of draining instances that can be taken."""
    if not self._draining:
      return
    for name, phase in [*self._draining.items()]:
      if phase == 'runs' and not self._has_runs(name):
        self._draining[name] = phase = 'copies'
        self._send_away(name)
      if phase == 'copies' and not self._flow.reads_from(name):
        self._draining[name] = phase = 'readers'
        self._unmount(name, self._backend.now_s())
      if phase == 'readers' and not self._flow.needs(name):
        del self._draining[name]
        self._gone.add(name)
        self._close(name)
        if role := self._becoming.pop(name, None):
          self._change(name, role)
          self._open(name)
        else:
          self._let_go(name)

  def _change(self, name: str, role: Role) -> None:
    """Makes an instance that is gone one of the role, if it is not."""
    if role == self._role(name):
      return
    if role == 'prefill':
      del self._flow.decode[name]
      self._flow.prefill[name] = self._make_prefill(name)
      self._mark(name, is_gone=True)
    else:
      del self._flow.prefill[name]
      self._flow.decode[name] = self._make_decode(name)

  def _let_go(self, name: str) -> None:
    """Where it is a process, that ends and is not started again."""
    if self._changing is not None:
      self._changing.dismiss(name)

  def _stay_without(self, name: str) -> bool:
    """Whether others of its role go on."""
    role = self._role(name)
    same = self._flow.prefill if role == 'prefill' else self._flow.decode
    return bool(same.keys() - {name} - self._gone - self._draining.keys())

  def _send_away(self, name: str) -> None:
    """Copies blocks that are hot and nowhere else to other instances."""
    now_s, size = self._backend.now_s(), self._layout.block_bytes
    tasks: dict[str, list[CopyTask]] = defaultdict(list)
    evicted: list[Evicted] = []
    for segment in self._segments(name):
      if medium(segment) == 'device':
        continue
      for key in self._master.inventory(segment):
        elsewhere = (owner(r.segment) != name for r in self._master.peek(key))
        if any(elsewhere) or not self._master.heat(key, now_s):
          continue
        to = self._master.choose_segment(key, size, now_s)
        if to is None or owner(to) == name or owner(to) in self._draining:
          continue
        start = self._master.copy_start(key, segment, to, now_s)
        evicted += start.evicted
        tasks[to] += [start.task] if start.task is not None else []
    self._flow.apply(dropped(self._master, evicted, now_s))
    for some in tasks.values():
      copies = self._client.copies(tuple(some), ())
      self._flow.apply(copying(self._master, copies, now_s))

  def _unmount(self, name: str, now_s: float) -> None:
    """From now on nobody new reads there."""
    for segment in self._segments(name):
      if medium(segment) != 'device':
        gone = self._master.unmount(segment, now_s).evicted
        self._flow.apply(dropped(self._master, gone, now_s))

  def _source(self, key: BlockKey, name: str, dst: str) -> str | None:
    """The instance's fastest segment but `dst` to read the block from."""
    there = [replica.segment for replica in self._master.peek(key)]
    segments = [
      segment
      for segment in there
      if owner(segment) == name
      and segment != dst
      and medium(segment) != 'device'
    ]
    return min(segments, key=lambda s: MEDIA.index(medium(s)), default=None)

  def _close(self, name: str) -> None:
    """Takes its memory out of the store, and tells that it is gone."""
    now_s, instance = self._backend.now_s(), self._flow.prefill.get(name)
    self._mark(name, is_gone=True)
    for segment in self._segments(name):
      gone = take_out(self._master, segment)
      if medium(segment) == 'device':
        if instance is not None and instance.cache is not None:
          instance.cache.clear()
        replicas = [evicted.replica for evicted in gone]
        self._flow.apply([*self._master.events.evicted(replicas, now_s)])
      else:
        self._flow.apply(dropped(self._master, gone, now_s))
    self._flow.apply([InstanceLost(now_s, name)])

  def _open(self, name: str) -> None:
    """Gives it empty memory, and tells that it is there.

    Of what its process finds on its SSD it has again what it had published.
    """
    self._gone.discard(name)
    self._coming.discard(name)
    instance = self._flow.prefill.get(name)
    if instance is not None:
      for segment in segments_of(self._spec, name):
        mount(self._master, self._spec, segment, self._layout.block_bytes)
      self._mark(name, is_gone=False)
    now_s = self._backend.now_s()
    self._flow.apply([InstanceJoined(now_s, name, self._role(name))])
    segment, known = ssd_segment(name), self._left.pop(name, None)
    is_there = segment in self._master.segments()
    if self._changing is None or not is_there or not self._spec.reuse:
      return
    # What it wrote and had not published may be wrong: it was not judged.
    size = self._layout.block_bytes
    found = adopted(self._master, self._backend, segment, size, now_s, known)
    self._flow.apply(found)

  def _mark(self, name: str, is_gone: bool) -> None:
    instance = self._flow.prefill.get(name)
    if instance is not None:
      instance.is_gone = is_gone
      if instance.store is not None:
        instance.store.is_closed = is_gone

  def _segments(self, name: str) -> list[str]:
    """Those of its segments that are mounted."""
    return [s for s in self._master.segments() if owner(s) == name]

  def _role(self, name: str) -> Role:
    return 'prefill' if name in self._flow.prefill else 'decode'

  def _has_runs(self, name: str) -> bool:
    return any(
      name in (run.placement.prefill, run.placement.decode)
      for run in self._flow.runs.values()
    )

  def _check_there(self, name: str) -> None:
    known = self._there
    if name not in known:
      raise ValueError(f'instance={name!r} is not one of {sorted(known)}')

  @property
  def _there(self) -> set[str]:
    return {*self._flow.prefill, *self._flow.decode} - self._gone

  def _check_segment(self, segment: str) -> None:
    known = self._master.segments()
    if segment not in known or medium(segment) == 'device':
      raise ValueError(f'{segment=} is no host, SSD or remote one of {known}')


def _needs(run: Run, name: str) -> bool:
  """Whether it can't go on without: all of a prefilled one is handed over."""
  at = run.placement
  return at.decode == name or (at.prefill == name and run.state != 'decoding')
