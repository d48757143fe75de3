# SPDX-License-Identifier: Apache-2.0
"""Copies of a segment in the order in which its policy lets them go.

A heap of (priority, copy) that is brought up to date only as copies come up:
using a copy writes two numbers and leaves the heap alone. Exact as long as a
use never lowers a priority and nothing else changes it.
"""

from collections.abc import Iterator
import heapq
from typing import Generic
from typing import Protocol
from typing import TypeVar

from mooncake_jax.store.eviction import Judged
from mooncake_jax.store.eviction import Policy


class Queued(Judged, Protocol):
  """A copy; its block is None once it is forgotten."""

  @property
  def block(self) -> object | None: ...


T = TypeVar('T', bound=Queued)


class EvictionQueue(Generic[T]):
  """Pops the copy with the lowest priority first."""

  __slots__ = ('_heap', 'policy')

  def __init__(self, policy: Policy):
    self.policy = policy
    self._heap: list[tuple[float, T]] = []

  def __len__(self) -> int:
    """Entries, those of forgotten copies included."""
    return len(self._heap)

  def __iter__(self) -> Iterator[T]:
    """The copies, in no order."""
    return (copy for _, copy in self._heap if copy.block is not None)

  def add(self, copy: T) -> None:
    heapq.heappush(self._heap, (self.policy(copy), copy))

  def pop(self) -> T | None:
    """Takes out the copy that is to go next; None if there is none."""
    heap, policy = self._heap, self.policy
    while heap:
      was, copy = heap[0]
      if copy.block is None:
        heapq.heappop(heap)
        continue
      priority = policy(copy)
      if priority == was:
        heapq.heappop(heap)
        return copy
      heapq.heapreplace(heap, (priority, copy))
    return None

  def compact(self) -> None:
    """Drops the entries of forgotten copies."""
    self._heap = [entry for entry in self._heap if entry[1].block is not None]
    heapq.heapify(self._heap)
