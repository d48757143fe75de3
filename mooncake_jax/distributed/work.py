# SPDX-License-Identifier: Apache-2.0
"""A work of the driver: its legs at workers, and what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from mooncake_jax.backend import Completion
from mooncake_jax.backend import Status
from mooncake_jax.backend import WorkId
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.commands import Transfer
from mooncake_jax.distributed.legs import Leg
from mooncake_jax.distributed.legs import sent_as
from mooncake_jax.distributed.legs import worst


@dataclass(eq=False)
class Work:
  """Under way at one instance or, a transfer between them, at several.

  Attributes:
    commands: what to tell whom when it starts.
    legs: of a transfer.
    num_ops: of a transfer.
    waits: works elsewhere that must end before this one is started.
    behind: works that its instance has it follow, and that have not ended: it
      ends after them.
    has_waited: there were such.
    opened_s: when the backend was asked for it.
    is_started: the commands were sent.
  """

  work_id: WorkId
  commands: dict[str, Command]
  legs: dict[str, Leg] = field(default_factory=dict)
  num_ops: int = 0
  waits: set[WorkId] = field(default_factory=set)
  behind: set[WorkId] = field(default_factory=set)
  has_waited: bool = False
  opened_s: float = 0.0
  is_started: bool = False
  ends: dict[str, Completion] = field(default_factory=dict)

  @property
  def home(self) -> str | None:
    """The instance that knows all of its progress, if one does."""
    if len(self.commands) == 1:
      return next(iter(self.commands))
    ends = [name for name, leg in self.legs.items() if not leg.only_sends]
    return ends[0] if len(ends) == 1 else None

  @property
  def starters(self) -> set[str]:
    """The instances that begin it."""
    legs = self.legs
    return {
      n for n in self.commands if n not in legs or not legs[n].only_receives
    }

  @property
  def left(self) -> set[str]:
    """Instances that have not told of its end."""
    return self.commands.keys() - self.ends.keys()

  @property
  def is_over(self) -> bool:
    """Whether it can be told of: all have told, and all that it follows."""
    return self.is_started and not self.left and not self.behind

  def put_off(self, seconds: float) -> None:
    """Its deadlines, by what it waited; see `Backend.transfer`."""
    for command in self.commands.values():
      if isinstance(command, Transfer):
        command.deadline_s += seconds

  def end(self, instance: str, completion: Completion) -> tuple[int, ...]:
    """Notes the end at an instance.

    Returns:
      Numbers of what it was to send and did not.
    """
    self.ends[instance] = completion
    leg = self.legs.get(instance)
    if completion.status == 'completed' or leg is None:
      return ()
    statuses = _padded(completion, leg)
    return tuple(
      number
      for op, status in zip(leg.ops, statuses)
      if status != 'completed' and (number := sent_as(op)) is not None
    )

  def completion(self) -> Completion:
    """Of the whole, once nothing is left."""
    if not self.legs:
      (only,) = self.ends.values()
      return only
    ends = [*self.ends.values()]
    # What the destination says comes first: the rest follows from it.
    order = sorted(self.ends, key=lambda name: not self.legs[name].numbers)
    bad = [n for n in order if self.ends[n].status != 'completed']
    first = self.ends[bad[0]] if bad else ends[0]
    return Completion(
      self.work_id,
      first.status,
      min(end.started_s for end in ends),
      max(end.time_s for end in ends),
      first.error,
      op_status=self._statuses(order),
    )

  def unstarted(self, now_s: float, status: Status, error: str) -> Completion:
    """Of one that was not started, and won't be."""
    ops = ('cancelled' if status == 'cancelled' else 'failed',) * self.num_ops
    end = failed(self.work_id, now_s, error or status)
    return replace(end, status=status, op_status=ops)

  def _statuses(self, order: Sequence[str]) -> tuple[Status, ...]:
    found: list[list[Status]] = [[] for _ in range(self.num_ops)]
    for name in order:
      leg = self.legs[name]
      statuses = _padded(self.ends[name], leg)
      for index, status in zip(leg.of or range(len(leg.ops)), statuses):
        found[index].append(status)
    return tuple(worst(each) for each in found)


class Following:
  """Which works follow which that have not ended."""

  def __init__(self):
    self._followers: dict[WorkId, list[Work]] = {}

  def note(self, work: Work, ahead: Work) -> None:
    """A work about to be started follows one under way."""
    self._followers.setdefault(ahead.work_id, []).append(work)
    if work.starters == {ahead.home} and ahead.is_started:
      # That instance sees to it; another leg's end may be told of later.
      work.behind.add(ahead.work_id)
    else:
      work.waits.add(ahead.work_id)
      work.has_waited = True

  def ended(self, work_id: WorkId) -> list[Work]:
    """Those that followed it, in order; for them it is no more."""
    followers = self._followers.pop(work_id, [])
    for work in followers:
      work.waits.discard(work_id)
      work.behind.discard(work_id)
    return followers


def _padded(completion: Completion, leg: Leg) -> tuple[Status, ...]:
  """A status an op, also of a leg that was lost or could not start."""
  if len(completion.op_status) == len(leg.ops):
    return completion.op_status
  return (completion.status,) * len(leg.ops)


def failed(
  work_id: WorkId, now_s: float, error: str, num_ops: int = 0
) -> Completion:
  """The end of what could not go on."""
  ops: tuple[Status, ...] = ('failed',) * num_ops
  return Completion(work_id, 'failed', now_s, now_s, error, op_status=ops)
