# SPDX-License-Identifier: Apache-2.0
"""Transfers on the virtual clock: flows through the ports of the links.

The ops of a transfer that cross the same ports flow one after another, in the
order given. Those that are ready, or will be at a known time, start as late as
they may without ending later, were the link theirs alone: op i, ready at r_i
and behind b_i seconds of earlier bytes, lets them start at max_i(r_i - b_i). So
a transfer that waits for layers leaves the link to others until then. What it
passes it shares (`ports.py`).
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from mooncake_jax.backend import LinkUse
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due
from mooncake_jax.sim.lanes import arrived
from mooncake_jax.sim.lanes import Lane
from mooncake_jax.sim.lanes import lanes_of
from mooncake_jax.sim.lanes import Layers
from mooncake_jax.sim.lanes import ports_of
from mooncake_jax.sim.ports import Flow
from mooncake_jax.sim.ports import Port
from mooncake_jax.sim.ports import Sharing
from mooncake_jax.sim.works import SimWork
from mooncake_jax.sim.works import UNKNOWN_S

# Ports, costs, the link whose costs they are, seconds of latency.
Path = list[tuple[Port, CostModel, Link, float]]


class Train(Flow):
  """What of one transfer crosses the same ports, in order.

  Attributes:
    groups: ops in a row of the same layers: (start, stop layer), bytes.
    num_planned, num_loaded, num_arrived: of them, those whose start is known,
      those that flow or have, and those that are there.
    num_due: loads that are planned and have not begun.
    planned_s: when the last of these begins.
    arrived_s: when the groups did.
    alone_s: seconds a byte takes where nobody shares.
  """

  __slots__ = (
    'alone_s',
    'arrived_s',
    'groups',
    'num_arrived',
    'num_due',
    'num_loaded',
    'num_planned',
    'planned_s',
    'work',
  )

  def __init__(
    self,
    work: 'SimTransfer',
    groups: list[tuple[Layers, int]],
    uses: tuple[tuple[Port, float], ...],
  ):
    super().__init__(uses, work.priority)
    self.work = work
    self.groups = groups
    self.alone_s = max([byte_s for _, byte_s in uses])
    self.arrived_s: list[float] = []
    self.num_planned = self.num_loaded = self.num_arrived = self.num_due = 0
    self.planned_s = 0.0


class SimTransfer(SimWork):
  """A transfer under way.

  Attributes:
    priority, begun_s, deadline_s: as `Backend.transfer` was called.
    trains: what crosses which ports.
    num_moving: trains that have not ended.
    start_s: when its first bytes flowed.
    due: what is to happen to it: loads, and its deadline.
  """

  __slots__ = (
    'begun_s',
    'deadline_s',
    'done_s',
    'due',
    'num_layers',
    'num_moving',
    'ops',
    'priority',
    'start_s',
    'trains',
  )

  def __init__(
    self,
    work_id: WorkId,
    ops: Sequence[TransferOp],
    priority: int,
    begun_s: float,
    deadline_s: float,
    num_layers: int,
  ):
    super().__init__(work_id)
    self.ops = ops
    self.priority = priority
    self.begun_s = begun_s
    self.deadline_s = deadline_s
    self.num_layers = num_layers
    self.trains: list[Train] = []
    self.num_moving = 0
    self.start_s = UNKNOWN_S
    self.due: list[Due] = []
    self.done_s: list[float] = []

  def let_go(self) -> None:
    super().let_go()
    self.trains = []
    self.due = []

  def layers_s(self) -> Sequence[float]:
    if self.done_s:
      return self.done_s
    done_s = self.done_s = [0.0] * self.num_layers
    for train in self.trains:
      for i, ((first, stop), _) in enumerate(train.groups):
        end_s = UNKNOWN_S
        if i < train.num_arrived:
          end_s = train.arrived_s[i]
        before_s = done_s[first:stop]
        if end_s >= max(before_s):
          done_s[first:stop] = [end_s] * len(before_s)
        else:
          done_s[first:stop] = [max(end_s, each_s) for each_s in before_s]
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
      settled: called when ops of a transfer have arrived.
      ended: called when all have.
      partners: instances on the same devices; pages go between them at once,
        as if they did not move.
    """
    self._homes = {decode: prefill for prefill, decode in partners.items()}
    self._costs_of = costs_of
    self._clock = clock
    self._settled = settled
    self._ended = ended
    self._sharing = Sharing(clock, self._reached)
    # By (what, whose): 'out' and 'in' of the network, else the link's name.
    self.ports: dict[tuple[str, str], Port] = defaultdict(Port)
    self._paths: dict[Lane, Path] = {}

  def enter(self, work: SimTransfer) -> None:
    """Starts a transfer, as far as it need not wait."""
    for lane, groups in lanes_of(work.ops, self._homes).items():
      work.trains.append(self._train(work, lane, groups))
    work.num_moving = len(work.trains)
    if work.trains:
      self.poke(work)
    else:
      work.due.append(self._clock.at(0.0, self._ended, work))

  def poke(self, work: SimTransfer) -> None:
    """Something that the transfer follows was settled, or nothing has to be."""
    now_s = self._clock.now_s
    for train in work.trains:
      first = train.num_planned
      start_s = self._extend(work, train)
      count = train.num_planned - first
      if not count:
        continue
      if start_s > train.planned_s:
        train.planned_s = start_s
      if train.planned_s > now_s or train.num_due:
        train.num_due += 1
        due = self._clock.at(train.planned_s, self._planned, train, count)
        work.due.append(due)
      else:
        self._load(train, count)

  def watch(self, work: SimTransfer) -> None:
    """Somebody follows it from now on, group by group."""
    for train in work.trains:
      if train.num_arrived < train.num_loaded:
        self._set_stop(train)
        self._sharing.restop(train)

  def forget_costs(self) -> None:
    """They have changed, for what starts from now on."""
    self._paths.clear()

  def remove(self, work: SimTransfer) -> None:
    """Nothing more of it flows."""
    for due in work.due:
      self._clock.drop(due)
    for train in work.trains:
      if train.byte_s:
        self._sharing.leave(train)

  def arrived(self, work: SimTransfer) -> list[bool]:
    """Which ops of a transfer under way have arrived."""
    moved_bytes: dict[Lane, float] = {}
    for lane, train in zip(lanes_of(work.ops, self._homes), work.trains):
      sent = sum([size for _, size in train.groups[: train.num_loaded]])
      left = self._sharing.left_bytes(train) if train.byte_s else 0.0
      moved_bytes[lane] = sent - left
    return arrived(work.ops, self._homes, moved_bytes)

  def uses(self) -> dict[tuple[str, str], LinkUse]:
    """What each port has carried."""
    return {
      name: LinkUse(port.moved_bytes, port.used_s)
      for name, port in self.ports.items()
    }

  # What crosses which ports.

  def _train(
    self, work: SimTransfer, lane: Lane, groups: list[tuple[Layers, int]]
  ) -> Train:
    """A train that passes the lane's ports."""
    num_bytes = sum([count for _, count in groups]) or 1
    uses, alone_s, has_latency = [], 0.0, False
    for port, costs, link, latency_s in self._path(lane):
      seconds = costs.transfer_s(num_bytes, link)
      # Costs may be noisy, so that nothing takes longer than some bytes.
      moving_s = max(seconds - latency_s, 1e-3 * seconds)
      uses.append((port, moving_s / num_bytes))
      alone_s = max(alone_s, seconds / num_bytes)
      has_latency = has_latency or latency_s > 0
    if has_latency:  # it slows the flow and takes nothing from others
      uses.append((Port(), alone_s))
    return Train(work, groups, tuple(uses))

  def _path(self, lane: Lane) -> Path:
    """The lane's ports, with whose costs they go by and their latency."""
    path = self._paths.get(lane)
    if path is None:
      path = []
      for what, whose, link in ports_of(lane):
        costs = self._costs_of(whose)
        latency_s = costs.transfer_s(0, link)
        path.append((self.ports[what, whose], costs, link, latency_s))
      self._paths[lane] = path
    return path

  # How it goes on.

  def _extend(self, work: SimTransfer, train: Train) -> float:
    """Takes the ops whose time is known; returns when they may start."""
    num_groups = len(train.groups)
    if not work.after or train.num_planned == num_groups:
      train.num_planned = num_groups
      return 0.0
    start_s = behind_s = 0.0
    for layers, num_bytes in train.groups[train.num_planned :]:
      ready_s = work.ready_s(*layers)
      if ready_s == UNKNOWN_S:
        break
      start_s = max(start_s, ready_s - behind_s)
      behind_s += num_bytes * train.alone_s
      train.num_planned += 1
    return start_s

  def _planned(self, train: Train, count: int) -> None:
    train.num_due -= 1
    self._load(train, count)

  def _load(self, train: Train, count: int) -> None:
    """The next groups begin to flow, or are put behind those that do."""
    work, first = train.work, train.num_loaded
    if not first and work.start_s == UNKNOWN_S:
      work.start_s = self._clock.now_s
    train.num_loaded = first + count
    added = sum([size for _, size in train.groups[first : first + count]])
    if train.byte_s:
      self._sharing.add(train, added)
      self._set_stop(train)
      self._sharing.restop(train)
    else:
      train.left_bytes = added
      self._set_stop(train)
      self._sharing.enter(train)

  def _set_stop(self, train: Train) -> None:
    """Its next stop is the end of a group if anybody follows, or of all."""
    behind = 0
    if train.work.followers and train.num_loaded - train.num_arrived > 1:
      rest = train.groups[train.num_arrived + 1 : train.num_loaded]
      behind = sum([size for _, size in rest])
      left = self._sharing.left_bytes(train)
      while behind and behind >= left:  # arrived before anybody followed
        self._arrive(train, 1)
        behind -= train.groups[train.num_arrived][1]
    train.stop_bytes = float(behind)

  def _arrive(self, train: Train, count: int) -> None:
    train.num_arrived += count
    train.arrived_s += [self._clock.now_s] * count
    train.work.done_s = []

  def _reached(self, train: Flow) -> None:
    """A group has arrived; without followers, all that flowed."""
    assert isinstance(train, Train)
    work, flowing = train.work, train.num_loaded - train.num_arrived
    self._arrive(train, 1 if train.stop_bytes else flowing)
    if train.num_arrived < train.num_loaded:
      self._set_stop(train)
      self._sharing.restop(train)
    else:
      self._sharing.leave(train)
    if train.num_arrived == len(train.groups):
      work.num_moving -= 1
    self._settled(work)
    if not work.num_moving:
      self._ended(work)
