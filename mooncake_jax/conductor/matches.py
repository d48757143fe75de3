# SPDX-License-Identifier: Apache-2.0
"""What a prompt matches, for all instances at once.

A mask has bit p for the instance at position p of the index. `Falls` says how
far instances come: [(3, 0b0101), (7, 0b0010)] where two match 3 blocks and one
7; who is in no mask matches none. So the work is in the number of distinct
lengths, not of instances.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Falls = list[tuple[int, int]]


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
  """Instances that match at least one block; their `Match` on demand.

  Attributes:
    sources: how far others could fetch, longest first: the first mask is of
      those that hold the longest prefix.
  """

  __slots__ = ('_fast', '_names', '_near', '_positions', '_usable', 'sources')

  def __init__(
    self,
    positions: Mapping[str, int],
    names: Sequence[str],
    usable: Falls,
    near: Falls,
    fast: Falls,
    sources: Falls,
  ):
    self._positions = positions
    self._names = names
    self._usable = usable
    self._near = near
    self._fast = fast
    self.sources = sources[::-1]

  def groups(self) -> list[Reuse]:
    """Instances by what they can reuse: disjoint, each in one group."""
    if self._near == self._usable and not self._fast:
      return [Reuse(n, 0, 0, mask) for n, mask in self._usable]
    return [
      Reuse(usable, usable - near, fast, mask)
      for usable, mask in self._usable
      for near, mask in _split(mask, self._near)
      for fast, mask in _split(mask, self._fast)
    ]

  @property
  def mask(self) -> int:
    """All instances that match at least one block."""
    mask = 0
    for _, some in self._usable:
      mask |= some
    return mask

  def at(self, position: int) -> Match:
    """Of the instance at a position of the index; 0 blocks if none match."""
    usable = _length(self._usable, position)
    return Match(
      _length(self.sources, position),
      usable,
      usable - _length(self._near, position),
      _length(self._fast, position),
    )

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


def positions(mask: int) -> list[int]:
  """Positions of a mask's bits, lowest first: [0, 2] of 0b101."""
  if not mask & (mask - 1):  # one bit or none
    return [mask.bit_length() - 1] if mask else []
  num_bytes = (mask.bit_length() + 7) // 8
  bits = np.unpackbits(
    np.frombuffer(mask.to_bytes(num_bytes, 'little'), np.uint8),
    bitorder='little',
  )
  return bits.nonzero()[0].tolist()


def _length(falls: Falls, position: int) -> int:
  for length, mask in falls:
    if mask >> position & 1:
      return length
  return 0


def _split(mask: int, falls: Falls) -> Iterator[tuple[int, int]]:
  """The mask in parts of one length each, 0 for who is in no fall."""
  for length, some in falls:
    if both := mask & some:
      yield length, both
      mask ^= both
  if mask:
    yield 0, mask
