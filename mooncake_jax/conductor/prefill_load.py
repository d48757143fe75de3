# SPDX-License-Identifier: Apache-2.0
"""Believed load of the prefill instances: queues and links, as arrays.

A queue is the predicted seconds of each request placed there and not yet
prefilled; the first of them has run since the one before it ended, or since
its prefix was there. What is learnt of an instance's pace holds for all that
wait there, whenever they came. A link is free once all that was planned on it
has moved. Arrays have one number an instance (suffix I), in the order of
`names`, so that a placement looks at all of them at once.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.arrays import ZERO
from mooncake_jax.conductor.corrections import Correction
from mooncake_jax.conductor.work_costs import PREFIX_LINKS
from mooncake_jax.conductor.work_costs import WorkCosts
from mooncake_jax.costs.model import Link

# A head this much later than predicted is taken to have ended unheard.
OVERDUE = 4.0
OVERDUE_S = 2.0


class _Queued(NamedTuple):
  seconds: float
  ready_s: float


_NOTHING = _Queued(0.0, 0.0)


class Planned(NamedTuple):
  """A transfer as planned on the link of row i."""

  i: int
  link: Link
  seconds: float
  end_s: float


class LinkWaits(dict[Link, np.ndarray]):
  """Seconds until each one's end of a link is free, [I]; made when asked."""

  def __init__(self, loads: 'PrefillLoads', now_s: float):
    super().__init__()
    self._loads = loads
    self._now_s = now_s

  def __missing__(self, link: Link) -> np.ndarray:
    wait_s_I = self[link] = self._loads.link_wait_s_I(link, self._now_s)
    return wait_s_I


class PrefillLoads:
  """Queues and links of all prefill instances."""

  def __init__(
    self,
    pace: Correction,
    instances: Iterable[tuple[str, WorkCosts]] = (),
  ):
    """Without instances, or with these.

    Args:
      pace: factors on the cost model's seconds of whoever is queued.
    """
    self.pace = pace
    self.names: list[str] = []
    self.row: dict[str, int] = {}
    self.work: list[WorkCosts] = []
    self._queues: list[dict[str, _Queued]] = []
    self._waiting_s_I = np.zeros(0)
    self._head_end_s_I = np.zeros(0)
    self._overdue_s_I = np.zeros(0)
    self._overdue_from_s = math.inf  # no head is overdue before
    self.accepts_I = np.zeros(0, bool)
    self.link_free_s_I: dict[Link, np.ndarray] = {
      link: np.zeros(0) for link in PREFIX_LINKS
    }
    for name, work in instances:
      self.join(name, work)

  def join(self, name: str, work: WorkCosts) -> None:
    """An idle instance; one that was here before takes requests again."""
    self.pace.join(self.row.get(name, len(self.names)))
    if name in self.row:
      i = self.row[name]
      self.work[i] = work
      self.accepts_I[i] = True
      return
    self.row[name] = len(self.names)
    self.names.append(name)
    self.work.append(work)
    self._queues.append({})
    self._waiting_s_I = np.append(self._waiting_s_I, 0.0)
    self._head_end_s_I = np.append(self._head_end_s_I, -np.inf)
    self._overdue_s_I = np.append(self._overdue_s_I, np.inf)
    self.accepts_I = np.append(self.accepts_I, True)
    for link, free_s_I in self.link_free_s_I.items():
      self.link_free_s_I[link] = np.append(free_s_I, 0.0)

  def close(self, name: str) -> None:
    """Takes no more requests: it drains, was lost, or changed its role."""
    if name in self.row:
      self.accepts_I[self.row[name]] = False

  def add(
    self,
    name: str,
    request_id: str,
    seconds: float,
    now_s: float,
    ready_s: float = 0.0,
  ) -> None:
    """Queues a request that occupies the instance for `seconds`.

    Args:
      seconds: as the cost model says.
      ready_s: when its prefix will be there; it does not start before.
    """
    i = self.row[name]
    queue = self._queues[i]
    queue[request_id] = _Queued(seconds, ready_s)
    if len(queue) == 1:
      self._start(i, queue[request_id], now_s)
    else:
      self._waiting_s_I[i] += seconds

  def done(self, name: str, request_id: str, time_s: float) -> None:
    """A prefill ended: the next one starts now. Ignores one not there."""
    i = self.row[name]
    if self._queues[i].pop(request_id, None) is not None:
      self._lead(i, time_s)

  def remove(self, name: str, request_id: str, now_s: float) -> None:
    """Takes out a request that will not be prefilled, or never was here."""
    i = self.row[name]
    queue = self._queues[i]
    is_head = next(iter(queue), None) == request_id
    gone = queue.pop(request_id, None)
    if is_head:
      self._lead(i, now_s)
    elif gone is not None:
      self._waiting_s_I[i] = max(self._waiting_s_I[i] - gone.seconds, 0.0)

  def occupy(self, i: int, link: Link, seconds: float, now_s: float) -> float:
    """Plans `seconds` of transfer on the link of row i; returns their end."""
    free_s_I = self.link_free_s_I[link]
    end_s = free_s_I[i] = max(free_s_I.item(i), now_s) + seconds
    return end_s

  def vacate(self, planned: Planned, now_s: float) -> None:
    """Gives back what of a planned transfer is still to come."""
    left_s = min(planned.end_s - now_s, planned.seconds)
    if left_s > 0:
      self.link_free_s_I[planned.link][planned.i] -= left_s

  def queue_s_I(self, now_s: float) -> np.ndarray:
    """EstimatePrefillQueueTime: what stands before a new request, [I]."""
    queue_s_I = self._head_end_s_I - now_s
    np.maximum(queue_s_I, ZERO, out=queue_s_I)
    queue_s_I += self._waiting_s_I * self.pace.factor_I
    return queue_s_I

  def link_wait_s_I(self, link: Link, now_s: float) -> np.ndarray:
    """Until a new transfer could start, [I]."""
    wait_s_I = self.link_free_s_I[link] - now_s
    return np.maximum(wait_s_I, ZERO, out=wait_s_I)

  def skip_overdue(self, now_s: float) -> None:
    """Gives up heads whose end was not heard of for far too long.

    Where telemetry is lost a queue would else never run down; one that is
    merely slow is corrected when its end comes.
    """
    if not self.is_due(now_s):
      return
    for i in np.flatnonzero(self._overdue_s_I < now_s):
      queue = self._queues[i]
      del queue[next(iter(queue))]
      self._lead(int(i), now_s)
    self._overdue_from_s = float(self._overdue_s_I.min(initial=np.inf))

  def is_due(self, now_s: float) -> bool:
    """Whether a head may be overdue."""
    return now_s > self._overdue_from_s

  def depth(self, name: str) -> int:
    return len(self._queues[self.row[name]])

  def __len__(self) -> int:
    """Requests in all queues."""
    return sum(map(len, self._queues))

  def _lead(self, i: int, now_s: float) -> None:
    """The first of queue i, if any, starts; the sum is taken afresh."""
    waiting = list(self._queues[i].values()) or [_NOTHING]
    self._start(i, waiting[0], now_s)
    self._waiting_s_I[i] = _sum_s(waiting[1:])

  def _start(self, i: int, head: _Queued, now_s: float) -> None:
    """Queue i has a new head; `_NOTHING` where it is empty."""
    since_s = max(now_s, head.ready_s)
    end_s, overdue_s = -math.inf, math.inf
    if head.seconds > 0:
      taken_s = head.seconds * self.pace.factor_I.item(i)
      end_s = since_s + taken_s
      overdue_s = since_s + OVERDUE * taken_s + OVERDUE_S
    self._head_end_s_I[i] = end_s
    self._overdue_s_I[i] = overdue_s
    self._overdue_from_s = min(self._overdue_from_s, overdue_s)


def _sum_s(queued: Sequence[_Queued]) -> float:
  return sum(entry.seconds for entry in queued)
