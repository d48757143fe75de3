# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: what a copy is worth; the lowest goes first.

A policy maps a copy to a number that depends on its uses, its last stamp, its
position and its size alone, and that a use never lowers. A chain is stamped
from its tail to its head, so all of them let tails go first.

As in the arXiv paper of Mooncake (2407.00079) Table 1: LRU, LFU and
LengthAware, 'like LFU but prioritising blocks later in requests'.
"""

from collections.abc import Callable
from typing import Protocol


class Judged(Protocol):
  """What policies see of a copy; see `objects.Copy`."""

  uses: int
  stamp: int
  position: int
  size_bytes: int


Policy = Callable[[Judged], float]

_STAMP_BITS = 48
_POSITION_BITS = 24
_LAST_POSITION = (1 << _POSITION_BITS) - 1


def lru(copy: Judged) -> float:
  """Least recently used first."""
  return copy.stamp


def lfu(copy: Judged) -> float:
  """Least often used since it was put first, then least recently."""
  return (copy.uses << _STAMP_BITS) + copy.stamp


def length_aware(copy: Judged) -> float:
  """Least often used first, then latest in its request, then as LRU."""
  early = _LAST_POSITION - min(copy.position, _LAST_POSITION)
  rank = (copy.uses << _POSITION_BITS) + early
  return (rank << _STAMP_BITS) + copy.stamp


POLICIES: dict[str, Policy] = {
  'lru': lru,
  'lfu': lfu,
  'length_aware': length_aware,
}
