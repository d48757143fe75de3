# SPDX-License-Identifier: Apache-2.0
"""The share of one instance in a simulation that is spread over processes.

What leaves for another instance takes this one's side of the link, and then is
told to the other; what comes takes no time here beyond that. So a link into an
instance is not shared by several that send to it, as it is in one process; and
a transfer of both what is here and what comes begins when that is there.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import math

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import WIRE
from mooncake_jax.costs.model import CostModel
from mooncake_jax.distributed.legs import comes_as
from mooncake_jax.sim.paced import LEAST_TICK_S
from mooncake_jax.sim.paced import PacedBackend
from mooncake_jax.sim.works import SimWork
from mooncake_jax.sim.works import UNKNOWN_S

MAX_OVER = 1 << 14  # numbers that are remembered as over, and as come early


class Awaited(SimWork):
  """What other processes are to send; all layers come at once."""

  __slots__ = ('done_s', 'missing', 'num_layers')

  def __init__(self, work_id: WorkId, missing: Iterable[int], num_layers: int):
    super().__init__(work_id)
    self.missing = {*missing}
    self.num_layers = num_layers
    self.done_s = UNKNOWN_S

  def layers_s(self) -> Sequence[float]:
    return [self.done_s] * self.num_layers


class PartBackend(PacedBackend):
  """`PacedBackend` of one instance; it also meets what others send it."""

  def __init__(
    self,
    costs: CostModel,
    stage_layers: Sequence[int],
    boundary_s: float,
    clock: Callable[[], float],
    start_s: float,
    least_tick_s: float = LEAST_TICK_S,
  ):
    """See `PacedBackend`; `start_s` on the clock is time 0."""
    super().__init__(
      costs,
      stage_layers,
      boundary_s=boundary_s,
      least_tick_s=least_tick_s,
      clock=clock,
    )
    self._start_s = start_s
    self._awaited: dict[int, Awaited] = {}
    self._inner: set[WorkId] = set()  # that nobody asked for as such
    # Numbers, the oldest first.
    self._early: dict[int, None] = {}
    self._unwanted: dict[int, None] = {}
    self._first = 0

  def transfer(
    self,
    ops: Sequence[TransferOp],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    """See `Backend`."""
    if isinstance(ops, BlockOps):
      return super().transfer(ops, priority, deadline_s, after)
    moving = [_across(op) for op in ops if comes_as(op) is None]
    numbers = [n for op in ops if (n := comes_as(op)) is not None]
    if not numbers:
      return super().transfer(moving, priority, deadline_s, after)
    work_id = self._await(numbers, deadline_s)
    if not moving:
      return work_id
    self._inner.add(work_id)
    return super().transfer(moving, priority, deadline_s, (*after, work_id))

  def wait(self, until_s: float | None) -> list[Completion]:
    """See `Backend`; may return early, with nothing."""
    told = super().wait(until_s)
    ended = {each.work_id for each in told} & self._inner
    self._inner -= ended
    return [each for each in told if each.work_id not in ended]

  def cancel(self, work_id: WorkId) -> None:
    """See `Backend`."""
    work = self._works.get(work_id)
    if isinstance(work, Awaited):
      self._end_early(work, 'cancelled', '')
    else:
      super().cancel(work_id)

  def landed(self, number: int) -> None:
    """What comes under this number is there."""
    if not self.wants(number):
      return
    work = self._awaited.pop(number, None)
    if work is None:
      _remember(self._early, number)
      return
    work.missing.discard(number)
    if not work.missing and work.work_id in self._works:
      self._complete(work)

  # See `hands.Arriving`.

  def begin_at(self, number: int) -> None:
    self._first = number

  def complete(self, number: int) -> None:
    self._awaited.pop(number, None)

  def fail(self, number: int, error: Exception) -> None:
    work = self._awaited.pop(number, None)
    if work is not None and work.work_id in self._works:
      self._end_early(work, 'failed', str(error))
    self.forget(number)

  def forget(self, number: int) -> None:
    work = self._awaited.pop(number, None)
    if work is not None and work.work_id in self._inner & self._works.keys():
      self._end_early(work, 'cancelled', '')
    self._early.pop(number, None)
    _remember(self._unwanted, number)

  def wants(self, number: int) -> bool:
    """Whether a work may still wait for it."""
    return number >= self._first and number not in self._unwanted

  def _await(self, numbers: Sequence[int], deadline_s: float) -> WorkId:
    """A work that ends when all of these have come."""
    missing = [n for n in numbers if n not in self._early]
    for number in numbers:
      self._early.pop(number, None)
    work = Awaited(next(self._ids), missing, self._num_layers)
    self._works[work.work_id] = work
    self._awaited.update(dict.fromkeys(missing, work))
    if not missing:
      self._clock.at(0.0, self._complete, work)
    elif math.isfinite(deadline_s):
      self._clock.at(deadline_s, self._late, work)
    return work.work_id

  def _complete(self, work: Awaited) -> None:
    now_s = work.done_s = self._clock.now_s
    self._settled(work)
    self._end(Completion(work.work_id, 'completed', now_s, now_s))

  def _late(self, work: Awaited) -> None:
    if work.work_id in self._works:
      self._end_early(work, 'timeout', 'late')


def _across(op: TransferOp) -> TransferOp:
  """The op, as in a simulation that knows the other instance."""
  dst = op.dst
  if isinstance(dst, Replica) and dst.segment.endswith(WIRE):
    return op._replace(dst=DevicePages(owner(dst.segment), ()))
  return op


def _remember(numbers: dict[int, None], number: int) -> None:
  numbers[number] = None
  if len(numbers) > MAX_OVER:
    del numbers[next(iter(numbers))]
