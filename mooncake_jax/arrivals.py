# SPDX-License-Identifier: Apache-2.0
"""Where requests come from: known before the run, or live from clients."""

from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace
import heapq
import itertools
import time
from typing import Protocol

from mooncake_jax.changes import Change
from mooncake_jax.changes import Changes
from mooncake_jax.changes import NOTHING
from mooncake_jax.cluster import Cluster
from mooncake_jax.request import Request

# An idle server's loop turns so often: the store reaps, and clocks go on.
TURN_AT_LEAST_S = 1.0


class Command(Protocol):
  """What is asked of the cluster beside requests; a `Change` is one."""

  def happen(self, cluster: Cluster) -> None:
    """Does it, in the loop's thread."""
    ...


class Agenda:
  """Requests to come and changes, in order of time, then of asking.

  Clients go away last: one may do so at the very time it came.
  """

  def __init__(self, requests: Iterable[Request], changes: Changes = NOTHING):
    self._order = itertools.count()
    self._changes = changes
    self._due: list[tuple[float, bool, int, Request | Command]] = []
    self._names: set[str] = set()
    self.num_requests = 0
    for change in changes.changes:
      self._push(change.at_s, change)
    for request in requests:
      self.add(request)

  @property
  def is_open(self) -> bool:
    """Whether requests are still to come."""
    return self.num_requests > 0

  @property
  def next_s(self) -> float | None:
    """When the next is due; None if there is none."""
    return self._due[0][0] if self._due else None

  def add(self, request: Request) -> None:
    """One more, and when its client will have gone.

    Raises:
      ValueError: an earlier one had the same `request_id`.
    """
    if request.request_id in self._names:
      raise ValueError(f'request_id={request.request_id!r} came twice')
    self._names.add(request.request_id)
    self.num_requests += 1
    self._push(request.arrival_s, request)
    if change := self._changes.of(request):
      self._push(change.at_s, change)

  def take(self, now_s: float) -> Request | Command | None:
    """The next that is due by now, if any."""
    if not self._due or self._due[0][0] > now_s:
      return None
    due = heapq.heappop(self._due)[-1]
    self.num_requests -= isinstance(due, Request)
    return due

  def _push(self, time_s: float, due: Request | Command) -> None:
    is_last = isinstance(due, Change) and due.what == 'cancel'
    heapq.heappush(self._due, (time_s, is_last, next(self._order), due))


class Live(Agenda):
  """Requests and commands from other threads, until it is closed.

  They are taken in the order in which they were posted. The loop's thread
  reads, any other posts; a request's `arrival_s` is when its client came,
  whatever it says. How many wait is bounded by who posts.
  """

  def __init__(self, wake: Callable[[], None]):
    """`wake` ends the loop's wait: `Backend.wake`."""
    super().__init__(())
    self._wake = wake
    self._posted: deque[tuple[float, Request | Command]] = deque()
    self._is_closed = False
    self._turned_s = 0.0

  @property
  def is_open(self) -> bool:
    return not self._is_closed or bool(self._posted)

  @property
  def next_s(self) -> float | None:
    return self._turned_s + TURN_AT_LEAST_S

  def post(self, due: Request | Command, came_s: float | None = None) -> None:
    """From any thread, while it is open.

    Args:
      came_s: when its client came, on `time.perf_counter`; None is now.
    """
    since_s = time.perf_counter() if came_s is None else came_s
    self._posted.append((since_s, due))
    self._wake()

  def close(self) -> None:
    """No more will come; the loop ends when all that came has ended."""
    self._is_closed = True
    self._wake()

  def take(self, now_s: float) -> Request | Command | None:
    self._turned_s = now_s
    if not self._posted:
      return None
    since_s, due = self._posted.popleft()
    if not isinstance(due, Request):
      return due
    waited_s = time.perf_counter() - since_s
    return replace(due, arrival_s=max(0.0, now_s - waited_s))
