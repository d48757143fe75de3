# SPDX-License-Identifier: Apache-2.0
"""Links on the virtual clock: each direction carries one thing after another.

The ops of a transfer cross each of their links in the order given. Those that
are ready, or will be at a known time, go as one burst, at an even rate, and as
late as it may start without ending later: op i, ready at r_i and behind b_i
seconds of the burst's earlier bytes, lets it start at max_i(r_i - b_i). So a
transfer that waits for layers leaves the link to others until then. Bursts
start in the order in which they may.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from functools import lru_cache

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due
from mooncake_jax.sim.works import SimWork
from mooncake_jax.sim.works import UNKNOWN_S

# A link and the instance whose end of it is busy.
Lane = tuple[Link, str]


@dataclass(eq=False)
class _Train:
  """What of one transfer crosses one lane, in order.

  Attributes:
    groups: ops in a row of the same layers: (start, stop layer), bytes.
    seconds: that all of them take there.
    next_group: the first that is in no burst yet.
    planned_s: when the last burst may start.
    num_planned: bursts that have not started.
    bursts: (first group, stop group, start_s) of those that have.
  """

  lane: Lane
  groups: list[tuple[tuple[int, int], int]]
  num_bytes: int = 0
  seconds: float = 0.0
  next_group: int = 0
  planned_s: float = 0.0
  num_planned: int = 0
  bursts: list[tuple[int, int, float]] = field(default_factory=list)

  def add(self, op: TransferOp) -> None:
    """Puts an op at the end."""
    layers, count = (op.start_layer, op.stop_layer), op.num_bytes
    self.num_bytes += count
    if self.groups and self.groups[-1][0] == layers:
      self.groups[-1] = layers, self.groups[-1][1] + count
    else:
      self.groups.append((layers, count))

  @property
  def per_byte_s(self) -> float:
    return self.seconds / self.num_bytes if self.num_bytes else 0.0

  def ends_s(self) -> dict[tuple[int, int], float]:
    """When the last op of each layer range has arrived, as far as settled."""
    ends: dict[tuple[int, int], float] = {}
    for first, stop, end_s in self.bursts:
      for layers, num_bytes in self.groups[first:stop]:
        end_s += num_bytes * self.per_byte_s
        ends[layers] = end_s
    for layers, _ in self.groups[self.bursts[-1][1] if self.bursts else 0 :]:
      ends[layers] = UNKNOWN_S
    return ends


@dataclass(eq=False)
class SimTransfer(SimWork):
  """A transfer under way.

  Attributes:
    begun_s, deadline_s: as `Backend.transfer` was called.
    num_moving: trains that have not ended.
    start_s, stop_s: of its bursts so far.
  """

  ops: tuple[TransferOp, ...] = ()
  begun_s: float = 0.0
  deadline_s: float = 0.0
  num_layers: int = 0
  trains: list[_Train] = field(default_factory=list)
  num_moving: int = 0
  start_s: float = UNKNOWN_S
  stop_s: float = 0.0
  due: list[Due] = field(default_factory=list)
  done_s: list[float] = field(default_factory=list)

  def layers_s(self) -> Sequence[float]:
    if self.done_s:
      return self.done_s
    done_s = self.done_s = [0.0] * self.num_layers
    for train in self.trains:
      for (first, stop), end_s in train.ends_s().items():
        for layer in range(first, stop):
          done_s[layer] = max(done_s[layer], end_s)
    return done_s


class Links:
  """All links of a cluster."""

  def __init__(
    self,
    costs_of: Callable[[str], CostModel],
    clock: Clock,
    settled: Callable[[SimWork], None],
    ended: Callable[[SimTransfer], None],
    partners: Mapping[str, str],
  ):
    """Starts idle.

    Args:
      costs_of: what work takes at an instance.
      settled: called when it is known when ops of a transfer will arrive.
      ended: called when that is known of all.
      partners: instances on the same devices; pages go between them at once,
        as if they did not move.
    """
    self._partners = partners
    self._costs_of = costs_of
    self._clock = clock
    self._settled = settled
    self._ended = ended
    self._free_s: dict[Lane, float] = defaultdict(float)

  def enter(self, work: SimTransfer) -> None:
    """Starts a transfer, as far as it need not wait."""
    trains: dict[Lane, _Train] = {}
    for op in work.ops:
      if self._stays(op):
        continue
      lane = _lane(op)
      train = trains.get(lane)
      if train is None:
        train = trains[lane] = _Train(lane, [])
      train.add(op)
    work.trains = list(trains.values())
    work.num_moving = len(trains)
    for train in work.trains:
      link, name = train.lane
      train.seconds = self._costs_of(name).transfer_s(train.num_bytes, link)
    self.poke(work)
    if not trains:
      self._ended(work)

  def poke(self, work: SimTransfer) -> None:
    """Something that the transfer follows was settled, or nothing has to be."""
    for train in work.trains:
      first = train.next_group
      start_s = self._extend(work, train)
      if train.next_group == first:
        continue
      train.planned_s = max(train.planned_s, start_s)
      train.num_planned += 1
      burst = work, train, first, train.next_group
      if train.planned_s > self._clock.now_s or train.num_planned > 1:
        work.due.append(self._clock.at(train.planned_s, self._burst, *burst))
      else:
        self._burst(*burst)

  def remove(self, work: SimTransfer) -> None:
    """Nothing more of it starts; what is on a link still takes its time."""
    for due in work.due:
      self._clock.drop(due)

  def _stays(self, op: TransferOp) -> bool:
    """Whether it goes from an instance to the one on the same devices."""
    src, dst = op.src, op.dst
    return (
      isinstance(src, DevicePages)
      and isinstance(dst, DevicePages)
      and self._partners.get(src.instance) == dst.instance
    )

  def _extend(self, work: SimTransfer, train: _Train) -> float:
    """Takes the ops whose time is known; returns when they may start."""
    if not work.after:
      train.next_group = len(train.groups)
      return 0.0
    start_s = behind_s = 0.0
    for layers, num_bytes in train.groups[train.next_group :]:
      ready_s = work.ready_s(*layers)
      if ready_s == UNKNOWN_S:
        break
      start_s = max(start_s, ready_s - behind_s)
      behind_s += num_bytes * train.per_byte_s
      train.next_group += 1
    return start_s

  def _burst(
    self, work: SimTransfer, train: _Train, first: int, stop: int
  ) -> None:
    """Groups [first, stop) go as soon as the lane is free."""
    start_s = max(self._clock.now_s, self._free_s[train.lane])
    stop_s = start_s + train.seconds
    if (first, stop) != (0, len(train.groups)):
      num_bytes = sum(count for _, count in train.groups[first:stop])
      stop_s = start_s + num_bytes * train.per_byte_s
    self._free_s[train.lane] = stop_s
    train.num_planned -= 1
    work.done_s = []
    train.bursts.append((first, stop, start_s))
    work.start_s = min(work.start_s, start_s)
    work.stop_s = max(work.stop_s, stop_s)
    if stop == len(train.groups):
      work.num_moving -= 1
    self._settled(work)
    if not work.num_moving:
      self._ended(work)


def _lane(op: TransferOp) -> Lane:
  """The link an op crosses and the instance whose end of it is busy."""
  src, dst = op.src, op.dst
  return _lane_between(
    src.segment if isinstance(src, Replica) else src.instance,
    isinstance(src, DevicePages),
    dst.segment if isinstance(dst, Replica) else dst.instance,
    isinstance(dst, DevicePages),
  )


@lru_cache(maxsize=4096)
def _lane_between(src: str, from_pages: bool, dst: str, to_pages: bool) -> Lane:
  source = 'device' if from_pages else medium(src)
  target = 'device' if to_pages else medium(dst)
  match source, target:
    case 'device', 'device':
      return 'handoff', owner(src)
    case _, 'ssd':
      return 'ssd_write', owner(dst)
    case 'ssd', _:
      return 'ssd_read', owner(src)
    case _, 'remote':
      return 'remote_write', owner(src)
    case 'remote', _:
      return 'remote_read', owner(dst)
    case 'device', _:
      return 'offload', owner(src)
    case _ if owner(src) != owner(dst):
      return 'copy', owner(src)
  return 'onload', owner(src)
