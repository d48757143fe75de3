# SPDX-License-Identifier: Apache-2.0
"""What a prompt matches, for all instances at once.

A mask has bit p for the instance at position p of the index. `Falls` says how
far instances come: [(3, 0b0101), (7, 0b0010)] where two match 3 blocks and one
7; who is in no mask matches none. So the work is in the number of distinct
lengths, not of instances.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.holders import Holders

Falls = list[tuple[int, int]]
Run = tuple[int, Holders]


@dataclass(frozen=True)
class Match:
  """Leading blocks of a prompt an instance can give, each to its first miss.

  Cumulative boundaries, as vLLM and Mooncake's indexer report them: device
  `fast` <= host `usable - slow` <= disk `usable`.

  Attributes:
    stored: blocks it holds now, which others may fetch too.
    usable: the same with those expected there by the time they are needed,
      and with leading ones that lie in its device memory only.
    slow: of the usable ones, those from the first on that lies on SSD only.
    fast: leading blocks that lie in its device memory.
  """

  stored: int = 0
  usable: int = 0
  slow: int = 0
  fast: int = 0


class Reuse(NamedTuple):
  """Instances that can reuse the same of a prompt; see `Match`."""

  usable: int
  slow: int
  fast: int
  mask: int


class Matches(Mapping[str, Match]):
  """Instances that match at least one block; what they match, on demand."""

  __slots__ = ('_falls', '_length', '_names', '_positions', '_runs')

  def __init__(
    self,
    positions: Mapping[str, int],
    names: Sequence[str],
    runs: list[Run],
    length: int,
    falls: Falls,
  ):
    """Of a walk along a prompt's blocks.

    Args:
      positions, names: of the index.
      runs: blocks of equal holders, each by its first block.
      length: blocks walked.
      falls: who has the blocks at all, on whatever medium.
    """
    self._positions = positions
    self._names = names
    self._runs = runs
    self._length = length
    self._falls = falls

  def groups(self) -> list[Reuse]:
    """Instances by what they can reuse: disjoint, each in one group."""
    if all(holders.is_plain for _, holders in self._runs):
      return [Reuse(length, 0, 0, mask) for length, mask in self._falls]
    usable, near, fast = self._by_tier()
    return [
      Reuse(length, length - short, device, mask)
      for length, group in usable
      for short, part in _split(group, near)
      for device, mask in _split(part, fast)
    ]

  def sources(self) -> Falls:
    """How far others could fetch, longest first: the first mask is of those
    that hold the longest prefix."""
    alive, falls = -1, []
    for start, holders in self._runs:
      still = alive & holders.sources
      if start and still != alive:
        falls.append((start, alive ^ still))
      alive = still
      if not alive:
        break
    if self._runs and alive:
      falls.append((self._length, alive))
    return falls[::-1]

  @property
  def mask(self) -> int:
    """All instances that match at least one block."""
    return self._runs[0][1].anyhow if self._runs else 0

  def at(self, position: int) -> Match:
    """Of the instance at a position of the index; 0 blocks if none match."""
    fast = self._until(lambda start, has: has.device >> position & 1)
    near = self._until(lambda i, has: i < fast or has.near >> position & 1)
    usable = self._until(lambda i, has: i < fast or has.held >> position & 1)
    stored = self._until(lambda i, has: has.sources >> position & 1)
    return Match(stored, usable, usable - near, fast)

  def __getitem__(self, instance: str) -> Match:
    position = self._positions[instance]
    if not self.mask >> position & 1:
      raise KeyError(instance)
    return self.at(position)

  def __iter__(self) -> Iterator[str]:
    return iter([self._names[p] for p in positions(self.mask)])

  def __len__(self) -> int:
    return self.mask.bit_count()

  def __repr__(self) -> str:
    return f'Matches({dict(self)})'

  def _until(self, has: Callable[[int, Holders], object]) -> int:
    """Blocks before the first run that `has` not."""
    for start, holders in self._runs:
      if not has(start, holders):
        return start
    return self._length

  def _by_tier(self) -> tuple[Falls, Falls, Falls]:
    """How far instances come with all media, without SSD, on the device."""
    falls: tuple[Falls, Falls, Falls] = ([], [], [])
    alive = (-1, -1, -1)
    for start, holders in self._runs:
      before, fast = alive, alive[2] & holders.device
      alive = (
        before[0] & (holders.held | fast),
        before[1] & (holders.near | fast),
        fast,
      )
      _fall(falls, start, before, alive)
    _fall(falls, self._length, alive, (0, 0, 0))
    return falls


def positions(mask: int) -> list[int]:
  """Positions of a mask's bits, lowest first: [0, 2] of 0b101."""
  if mask.bit_count() > 8:
    return position_array(mask).tolist()
  found = []
  while mask:
    lowest = mask & -mask
    found.append(lowest.bit_length() - 1)
    mask ^= lowest
  return found


def position_array(mask: int) -> np.ndarray:
  """`positions` as an array, to take rows of other arrays by."""
  if mask.bit_count() <= 8:
    return np.array(positions(mask), np.int64)
  num_bytes = (mask.bit_length() + 7) // 8
  some = np.frombuffer(mask.to_bytes(num_bytes, 'little'), np.uint8)
  return np.unpackbits(some, bitorder='little').nonzero()[0]


def _fall(
  falls: tuple[Falls, ...],
  length: int,
  before: tuple[int, ...],
  now: tuple[int, ...],
) -> None:
  """Notes who matched `length` blocks and not the next."""
  for fall, old, new in zip(falls, before, now):
    if length and old != new:
      fall.append((length, old ^ new))


def _split(mask: int, falls: Falls) -> Iterator[tuple[int, int]]:
  """The mask in parts of one length each, 0 for who is in no fall."""
  for length, some in falls:
    if both := mask & some:
      yield length, both
      mask ^= both
  if mask:
    yield 0, mask
