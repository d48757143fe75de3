# SPDX-License-Identifier: Apache-2.0
"""Eviction policies: what a block's copy is worth; the lowest goes first.

A policy maps a copy to a number that depends on its uses, its last stamp, its
position and its size alone, and that a use never lowers. A chain is stamped
from its tail to its head, so all of them let tails go first; of blocks that
were put and used together no policy may rate a later one higher, as the last
is asked for all of them.

As in the arXiv paper of Mooncake (2407.00079) Table 1: LRU, LFU and
LengthAware, 'like LFU but prioritising blocks later in requests'.
"""

from collections.abc import Callable
from math import log2
from typing import Protocol


class Judged(Protocol):
  """What policies see of a block's copy.

  Attributes:
    uses: puts and leased gets of it.
    stamp: of the last, in the Master's count of uses.
    position: in the chain that was put, in blocks.
  """

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


def aged(capacity_blocks: int) -> Policy:
  """Expected benefit: how often used, how long ago, how deep in its prompt.

  Each doubling of its uses makes up for half a segment's worth of uses of
  other blocks since its last; each doubling of its position takes a tenth of
  that away, since fewer requests get so far than recomputing costs more.
  Against LRU it keeps what came back from being swept out by long prompts
  that never do; unlike LFU it forgets. What it gains over LRU on the
  published traces is small, and not everywhere (`scripts/bench.py hits`).

  Args:
    capacity_blocks: of the segment.
  """
  per_use, per_depth = 0.5 * capacity_blocks, 0.05 * capacity_blocks

  def priority(copy: Judged) -> float:
    worth = per_use * log2(copy.uses) if copy.uses > 1 else 0.0
    return copy.stamp + worth - per_depth * log2(1 + copy.position)

  return priority


# By name: makes the policy of a segment of so many blocks.
POLICIES: dict[str, Callable[[int], Policy]] = {
  'lru': lambda _: lru,
  'lfu': lambda _: lfu,
  'length_aware': lambda _: length_aware,
  'aged': aged,
}
