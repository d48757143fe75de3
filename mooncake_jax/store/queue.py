# SPDX-License-Identifier: Apache-2.0
"""Copies of a segment in the order in which its policy lets them go.

A heap of (priority of its last block, replica id) that is brought up to date
only as copies come up: using a copy writes two numbers and leaves the heap
alone. Exact as long as a use never lowers a priority, the last block of what
was put together goes first, and nothing else changes it. It names no copies,
since the garbage collector forgets tuples of numbers at its first pass, and
visits others at every one.
"""

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sized
from dataclasses import dataclass
from functools import partial
import heapq
from typing import Generic
from typing import Protocol
from typing import TypeVar

from mooncake_jax.store.eviction import Judged
from mooncake_jax.store.eviction import Policy


class Queued(Judged, Protocol):
  """A copy of blocks in a row, judged by the last of them.

  It has no keys any more once it is forgotten.
  """

  @property
  def replica_id(self) -> int: ...

  @property
  def keys(self) -> Sized: ...


@dataclass(slots=True)
class _Before:
  """What a policy sees of a block before the last one."""

  uses: int
  stamp: int
  position: int
  size_bytes: int


T = TypeVar('T', bound=Queued)
Entry = tuple[float, int]


class EvictionQueue(Generic[T]):
  """Pops the blocks with the lowest priority first, of equals the oldest."""

  __slots__ = ('_copies', '_heap', 'policy')

  def __init__(self, policy: Policy):
    self.policy = policy
    self._heap: list[Entry] = []
    self._copies: dict[int, T] = {}

  def __len__(self) -> int:
    """Entries, those of forgotten copies included."""
    return len(self._heap)

  def __iter__(self) -> Iterator[T]:
    """The copies, in no order."""
    return (c for c in self._copies.values() if c.keys)

  def __contains__(self, copy: T) -> bool:
    return self._copies.get(copy.replica_id) is copy

  def add(self, copy: T) -> None:
    replica_id = copy.replica_id
    self._copies[replica_id] = copy
    heapq.heappush(self._heap, (self.policy(copy), replica_id))

  def pop(self) -> tuple[T, int] | None:
    """Takes out the copy that is to go next; None if there is none.

    Returns:
      It, and how many of its last blocks go before any of another copy.
    """
    if not self._is_exact():
      return None
    _, replica_id = heapq.heappop(self._heap)
    copy = self._copies.pop(replica_id)
    num_blocks = len(copy.keys)
    if num_blocks == 1 or not self._is_exact():
      return copy, num_blocks
    other, entry = self._heap[0], partial(self._entry, copy)
    if entry(num_blocks - 1) < other:
      return copy, num_blocks
    return copy, max(bisect_left(range(num_blocks), other, key=entry), 1)

  def compact(self) -> None:
    """Drops the entries of forgotten copies."""
    self._copies = {c.replica_id: c for c in self}
    self._heap = [entry for entry in self._heap if entry[1] in self._copies]
    heapq.heapify(self._heap)

  def _is_exact(self) -> bool:
    """Sees to it that the first entry holds; False if there is none."""
    heap, copies, policy = self._heap, self._copies, self.policy
    while heap:
      was, replica_id = heap[0]
      copy = copies[replica_id]
      if not copy.keys:
        heapq.heappop(heap)
        del copies[replica_id]
        continue
      priority = policy(copy)
      if priority == was:
        return True
      heapq.heapreplace(heap, (priority, replica_id))
    return False

  def _entry(self, copy: T, count: int) -> Entry:
    """Of the block that stands `count` before the copy's last."""
    block = _Before(
      copy.uses, copy.stamp + count, copy.position - count, copy.size_bytes
    )
    return self.policy(block), copy.replica_id
