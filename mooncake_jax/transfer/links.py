# SPDX-License-Identifier: Apache-2.0
"""A link: one thread that moves arrays into one instance's memory.

Every instance has two, into its devices and into its pinned host memory, so
arrivals at one place queue by priority and those at different places overlap.
A link moves whole arrays by eager `device_put` and waits for them; it never
runs a program on a pool. Small moves of one priority go in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
import heapq
import itertools
import threading

import jax
from jax.sharding import Sharding

from mooncake_jax.transfer.budget import ByteBudget

BATCH_BYTES = 16 << 20
BATCH_MOVES = 64


@dataclass(frozen=True, eq=False)
class Move:
  """Arrays to move together.

  Attributes:
    arrays, targets: what, and where each goes.
    begin: called before the bytes are read; False drops the move.
    arrived: called on the link's thread with the arrays at their targets.
    failed: called if they don't arrive or `arrived` raises.
    left: called when the source arrays are no longer needed, whatever came.
  """

  arrays: tuple[jax.Array, ...]
  targets: tuple[Sharding, ...]
  begin: Callable[[], bool]
  arrived: Callable[[list[jax.Array]], None]
  failed: Callable[[Exception], None]
  left: Callable[[], None] = lambda: None

  @property
  def num_bytes(self) -> int:
    return sum(array.nbytes for array in self.arrays)


class Link:
  """Moves in order of priority, first come first served within one."""

  def __init__(
    self,
    name: str,
    on_crash: Callable[[str, BaseException], None],
    budget: ByteBudget | None = None,
  ):
    """Starts the thread.

    Args:
      on_crash: called if the thread itself fails.
      budget: of bytes arrived and not yet taken up; the receiver gives them
        back. None is no limit.
    """
    self._name = name
    self._on_crash = on_crash
    self._budget = budget
    self._changed = threading.Condition()
    self._queue: list[tuple[int, int, Move]] = []
    self._order = itertools.count()
    self._closed = False
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def submit(self, move: Move, priority: int) -> None:
    """Queues a move; lower priority first. Any thread may call."""
    with self._changed:
      heapq.heappush(self._queue, (priority, next(self._order), move))
      self._changed.notify()

  def close(self) -> None:
    """Ends the thread after the move under way; drops the others."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    self._thread.join()

  def _main(self) -> None:
    try:
      while batch := self._next_batch():
        self._move(batch)
    except BaseException as error:
      self._on_crash(self._name, error)

  def _next_batch(self) -> list[Move]:
    """Waits for moves; empty once closed."""
    with self._changed:
      self._changed.wait_for(lambda: self._queue or self._closed)
      if self._closed:
        return []
      priority, _, first = heapq.heappop(self._queue)
      batch, num_bytes = [first], first.num_bytes
      while self._queue and len(batch) < BATCH_MOVES:
        other, _, move = self._queue[0]
        num_bytes += move.num_bytes
        if other != priority or num_bytes > BATCH_BYTES:
          break
        batch.append(heapq.heappop(self._queue)[2])
      return batch

  def _move(self, batch: list[Move]) -> None:
    live = [move for move in batch if move.begin()]
    num_bytes = sum(move.num_bytes for move in live)
    if self._budget and not self._budget.take(num_bytes):
      return
    try:
      moved = self._put(live)
    except Exception:
      for move in live:  # finds those that are not to blame
        self._deliver(move, lambda move=move: self._put([move])[0])
    else:
      for move, arrays in zip(live, moved):
        self._deliver(move, lambda arrays=arrays: arrays)
    for move in batch:
      move.left()

  def _put(self, batch: list[Move]) -> list[list[jax.Array]]:
    """Moves all arrays of the batch and waits for them."""
    arrays = [array for move in batch for array in move.arrays]
    targets = [target for move in batch for target in move.targets]
    moved = iter(jax.block_until_ready(jax.device_put(arrays, targets)))
    return [[next(moved) for _ in move.arrays] for move in batch]

  def _deliver(self, move: Move, arrays: Callable[[], list[jax.Array]]) -> None:
    """Hands over what arrived; the receiver owns its bytes from then on."""
    try:
      move.arrived(arrays())
    except Exception as error:
      if self._budget:
        self._budget.give(move.num_bytes)
      move.failed(error)
