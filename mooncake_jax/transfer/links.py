# SPDX-License-Identifier: Apache-2.0
"""A link: one thread that moves arrays into one instance's memory.

Every instance has two, into its devices and into its pinned host memory, so
arrivals at one place queue by priority and those at different places overlap.
A link moves whole arrays by eager `device_put` and waits for them; it never
runs a program on a pool. Small moves of one priority go in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
import time
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding
import numpy as np

from mooncake_jax.transfer import cpu_copies
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.entries import aligned
from mooncake_jax.transfer.heads import HeadSlices
from mooncake_jax.transfer.worker import LinkCount
from mooncake_jax.transfer.worker import Worker

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
    verify: called after `begin`; raises where the bytes are not right.
    is_private: nobody else has the arrays: a CPU device, whose memory kinds
      are one memory, takes them as they are instead of a copy.

  On CPU devices NumPy's arrays arrive: to make JAX's of them takes 0.1 ms
  each, and who needs them can do it then.
  """

  arrays: HeadSlices
  targets: tuple[SingleDeviceSharding, ...]
  begin: Callable[[], bool]
  arrived: Callable[[list[Any]], None]
  failed: Callable[[Exception], None]
  left: Callable[[], None] = lambda: None
  verify: Callable[[], None] = lambda: None
  is_private: bool = False

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
    self._budget = budget
    self.name = name
    self._bytes_per_s: float | None = None
    self._free_s = 0.0
    self._worker: Worker[Move] = Worker(name, self._move, on_crash, _joins)

  @property
  def count(self) -> LinkCount:
    return self._worker.count

  def pace(self, bytes_per_s: float | None) -> None:
    """From now on bytes arrive no faster: a slower link, for experiments."""
    self._bytes_per_s = bytes_per_s

  def submit(
    self, move: Move, priority: int, may_run_now: bool = False
  ) -> None:
    """Queues a move; lower priority first. Any thread may call.

    Args:
      may_run_now: a move that copies nothing is made on the calling thread.
    """
    may_run_now &= self._budget is None and self._bytes_per_s is None
    if may_run_now and _copies_nothing(move):
      self._worker.serve_now(move)
    else:
      self._worker.submit(move, priority)

  def add_count(self, count: LinkCount) -> None:
    """Counts what went where the link leads, but needed no link."""
    self._worker.add_count(count)

  def close(self) -> None:
    """Ends the thread after the move under way; drops the others."""
    self._worker.close()

  def _move(self, batch: list[Move]) -> None:
    live = [move for move in batch if self._may_go(move)]
    num_bytes = sum(move.num_bytes for move in live)
    if self._budget and not self._worker.take(self._budget, num_bytes):
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

  def _may_go(self, move: Move) -> bool:
    if not move.begin():
      return False
    try:
      move.verify()
    except Exception as error:
      move.failed(error)
      return False
    return True

  def _put(self, batch: list[Move]) -> list[list[Any]]:
    """Moves all arrays of the batch and waits for them."""
    kept = [_on_cpu(move) for move in batch]
    ways = [move for move, k in zip(batch, kept) if k is None]
    arrays = [array for move in ways for array in move.arrays]
    targets = [target for move in ways for target in move.targets]
    moved = iter(_device_put(arrays, targets))
    return [
      [next(moved) for _ in move.arrays] if k is None else k
      for move, k in zip(batch, kept)
    ]

  def _deliver(self, move: Move, arrays: Callable[[], list[Any]]) -> None:
    """Hands over what arrived; the receiver owns its bytes from then on."""
    try:
      taken = arrays()
      self._wait_for(move.num_bytes)
      move.arrived(taken)
      self._worker.moved(move.num_bytes)
    except Exception as error:
      if self._budget:
        self._budget.give(move.num_bytes)
      move.failed(error)

  def _wait_for(self, num_bytes: int) -> None:
    """Until the bytes would have come over a link of the pace set."""
    if self._bytes_per_s is not None:
      start_s = max(self._free_s, time.perf_counter())
      self._free_s = start_s + num_bytes / self._bytes_per_s
      time.sleep(max(self._free_s - time.perf_counter(), 0.0))


def _joins(batch: list[Move], move: Move) -> bool:
  """Small moves go in one call."""
  num_bytes = sum(m.num_bytes for m in batch) + move.num_bytes
  return len(batch) < BATCH_MOVES and num_bytes <= BATCH_BYTES


def _device_put(arrays: list[Any], targets: list[Any]) -> list[jax.Array]:
  if not arrays:  # JAX takes its time for nothing, too
    return []
  return jax.block_until_ready(jax.device_put(arrays, targets))


def _copies_nothing(move: Move) -> bool:
  """Whether the arrays, as NumPy's, are used in place where they go."""
  return move.is_private and _is_on_cpu(move)


def _on_cpu(move: Move) -> list[Any] | None:
  """What arrives where all is a CPU's memory; None elsewhere."""
  if not _is_on_cpu(move):
    return None
  arrays = map(np.asarray, move.arrays)
  return [*arrays] if move.is_private else [*map(copied, arrays)]


def copied(array: np.ndarray) -> np.ndarray:
  """The same in new memory that a CPU device uses in place."""
  copy = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
  np.copyto(copy, array)
  return copy


def _is_on_cpu(move: Move) -> bool:
  devices: set[Any] = set()
  for array, target in zip(move.arrays, move.targets):
    devices |= target.device_set
    if isinstance(array, jax.Array):
      devices |= array.devices()
  return cpu_copies.is_taken(devices)
