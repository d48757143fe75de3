# SPDX-License-Identifier: Apache-2.0
"""Copies of a segment in the order in which its policy lets them go.

A heap of (priority, replica id) that is brought up to date only as copies come
up: using a copy writes two numbers and leaves the heap alone. Exact as long as
a use never lowers a priority and nothing else changes it. It names no copies,
since the garbage collector forgets tuples of numbers at its first pass, and
visits others at every one: most of a put's time at a million keys.
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
  def replica_id(self) -> int: ...

  @property
  def block(self) -> object | None: ...


T = TypeVar('T', bound=Queued)


class EvictionQueue(Generic[T]):
  """Pops the copy with the lowest priority first, of equals the oldest."""

  __slots__ = ('_copies', '_heap', 'policy')

  def __init__(self, policy: Policy):
    self.policy = policy
    self._heap: list[tuple[float, int]] = []
    self._copies: dict[int, T] = {}

  def __len__(self) -> int:
    """Entries, those of forgotten copies included."""
    return len(self._heap)

  def __iter__(self) -> Iterator[T]:
    """The copies, in no order."""
    return (c for c in self._copies.values() if c.block is not None)

  def add(self, copy: T) -> None:
    replica_id = copy.replica_id
    self._copies[replica_id] = copy
    heapq.heappush(self._heap, (self.policy(copy), replica_id))

  def pop(self) -> T | None:
    """Takes out the copy that is to go next; None if there is none."""
    heap, copies, policy = self._heap, self._copies, self.policy
    while heap:
      was, replica_id = heap[0]
      copy = copies[replica_id]
      priority = policy(copy)
      if copy.block is not None and priority != was:
        heapq.heapreplace(heap, (priority, replica_id))
        continue
      heapq.heappop(heap)
      del copies[replica_id]
      if copy.block is not None:
        return copy
    return None

  def compact(self) -> None:
    """Drops the entries of forgotten copies."""
    self._copies = {c.replica_id: c for c in self}
    self._heap = [entry for entry in self._heap if entry[1] in self._copies]
    heapq.heapify(self._heap)
