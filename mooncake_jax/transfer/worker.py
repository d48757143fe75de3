# SPDX-License-Identifier: Apache-2.0
"""A thread that serves what is queued, lower priority first."""

from collections.abc import Callable
from dataclasses import dataclass
import heapq
import itertools
import threading
import time
from typing import Generic
from typing import TypeVar

from mooncake_jax.transfer.budget import ByteBudget

T = TypeVar('T')


@dataclass(frozen=True)
class LinkCount:
  """What a link has moved since it was made.

  Attributes:
    num_moves: that arrived.
    busy_s: seconds spent moving, failed moves included; not those spent
      waiting until the receiver had room.
  """

  num_bytes: int = 0
  num_moves: int = 0
  busy_s: float = 0.0


class Worker(Generic[T]):
  """First come first served within a priority. Any thread may submit."""

  def __init__(
    self,
    name: str,
    serve: Callable[[list[T]], None],
    on_crash: Callable[[str, BaseException], None],
    joins: Callable[[list[T], T], bool] = lambda batch, item: False,
    num_threads: int = 1,
  ):
    """Starts the thread.

    Args:
      serve: called on the thread with what to do next.
      on_crash: called if the thread itself fails.
      joins: whether a next item of the same priority goes along with a batch.
      num_threads: that serve at once; what is then counted as busy is each
        one's share.
    """
    self._name = name
    self._serve = serve
    self._on_crash = on_crash
    self._joins = joins
    self._changed = threading.Condition()
    self._queue: list[tuple[int, int, T]] = []
    self._order = itertools.count()
    self._is_closed = False
    self._count = LinkCount()
    self._waited = threading.local()
    self._threads = [
      threading.Thread(target=self._main, name=name, daemon=True)
      for _ in range(num_threads)
    ]
    for thread in self._threads:
      thread.start()

  @property
  def count(self) -> LinkCount:
    """Bytes and seconds up to now."""
    return self._count

  def submit(self, item: T, priority: int) -> None:
    """Queues an item; lower priority first."""
    with self._changed:
      heapq.heappush(self._queue, (priority, next(self._order), item))
      self._changed.notify()

  def moved(self, num_bytes: int) -> None:
    """Counts what arrived."""
    self.add_count(LinkCount(num_bytes, 1))

  def serve_now(self, item: T) -> None:
    """Serves an item on the calling thread, past the queue."""
    self._timed([item])

  def close(self) -> None:
    """Ends the thread after what it serves now; drops the rest."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    for thread in self._threads:
      thread.join()

  def _main(self) -> None:
    try:
      while batch := self._next():
        self._timed(batch)
        del batch  # what it holds is not kept until the next one comes
    except BaseException as error:
      self._on_crash(self._name, error)

  def _timed(self, batch: list[T]) -> None:
    start_s, self._waited.s = time.perf_counter(), 0.0
    self._serve(batch)
    busy_s = time.perf_counter() - start_s - self._waited.s
    self.add_count(LinkCount(busy_s=busy_s / len(self._threads)))

  def take(self, budget: ByteBudget, num_bytes: int) -> bool:
    """Waits for room while it serves, which is not counted as busy.

    Returns:
      False: the budget was closed.
    """
    start_s = time.perf_counter()
    is_taken = budget.take(num_bytes)
    self._waited.s += time.perf_counter() - start_s
    return is_taken

  def add_count(self, more: LinkCount) -> None:
    """Adds to what was moved."""
    with self._changed:
      c = self._count
      self._count = LinkCount(
        c.num_bytes + more.num_bytes,
        c.num_moves + more.num_moves,
        c.busy_s + more.busy_s,
      )

  def _next(self) -> list[T]:
    """Waits for items; empty once closed."""
    with self._changed:
      self._changed.wait_for(lambda: self._queue or self._is_closed)
      if self._is_closed:
        return []
      priority, _, first = heapq.heappop(self._queue)
      batch = [first]
      while self._queue and self._queue[0][0] == priority:
        if not self._joins(batch, self._queue[0][2]):
          break
        batch.append(heapq.heappop(self._queue)[2])
      return batch
