# SPDX-License-Identifier: Apache-2.0
"""A segment: an instance's registered pinned host memory, by replica.

The Master decides what lies here; the segment only keeps, gives, forgets and
refuses what does not fit. Any thread may call it.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import threading
from typing import NamedTuple

from mooncake_jax.transfer.checksum import checksum
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.checksum import raw_bytes
from mooncake_jax.transfer.heads import HeadSlices


class Part(NamedTuple):
  """Layers [start_layer, stop_layer) of a block, as slices of its heads.

  Attributes:
    total: checksum of the slices' bytes, where one is kept.
  """

  start_layer: int
  stop_layer: int
  slices: HeadSlices
  total: int | None = None

  @property
  def num_bytes(self) -> int:
    return sum(array.nbytes for array in self.slices)


class HostSegment:
  """The parts of replicas in the pinned host memory of one instance."""

  def __init__(self, name: str, capacity_bytes: int):
    """Makes an empty segment; memory is taken as parts come."""
    if capacity_bytes < 0:
      raise ValueError(f'segment {name!r}: {capacity_bytes=} must be >= 0')
    self.name = name
    self.capacity_bytes = capacity_bytes
    self._lock = threading.Lock()
    self._parts: dict[int, list[Part]] = {}
    self._used_bytes = 0

  @property
  def used_bytes(self) -> int:
    return self._used_bytes

  @property
  def replica_ids(self) -> frozenset[int]:
    with self._lock:
      return frozenset(self._parts)

  def put(self, replica_id: int, part: Part) -> None:
    """Keeps a part of a replica.

    Raises:
      ValueError: there is no room, or the replica has one of these layers.
    """
    layers, num_bytes = (part.start_layer, part.stop_layer), part.num_bytes
    with self._lock:
      for other in self._parts.get(replica_id, ()):
        if overlap((other.start_layer, other.stop_layer), layers):
          name = self._name(replica_id)
          raise ValueError(f'{name}: {layers=} are there already')
      free_bytes = self.capacity_bytes - self._used_bytes
      if num_bytes > free_bytes:
        raise ValueError(
          f'{self._name(replica_id)}: {num_bytes=} exceed the {free_bytes} '
          f'free of capacity_bytes={self.capacity_bytes}'
        )
      self._parts.setdefault(replica_id, []).append(part)
      self._used_bytes += num_bytes

  def read(
    self, replica_id: int, start_layer: int, stop_layer: int
  ) -> tuple[Part, ...]:
    """Returns the parts that hold the layers, lowest first.

    The first and the last may hold more. They stay readable when dropped.

    Raises:
      LookupError: some of these layers are not here.
    """
    with self._lock:
      parts = {
        (part.start_layer, part.stop_layer): part
        for part in self._parts.get(replica_id, ())
      }
    ranges = covering(parts, start_layer, stop_layer, self._name(replica_id))
    return tuple(parts[layers] for layers in ranges)

  def keep_only(self, numbers: Mapping[int, int]) -> None:
    """Forgets all others; those bear the numbers that they are mapped to."""
    with self._lock:
      self._parts = {
        numbers[replica_id]: parts
        for replica_id, parts in self._parts.items()
        if replica_id in numbers
      }
      self._used_bytes = sum(
        part.num_bytes for parts in self._parts.values() for part in parts
      )

  def rename(self, replica_id: int, number: int) -> None:
    """A replica bears another number from now on; ignores an unknown one."""
    with self._lock:
      if parts := self._parts.pop(replica_id, None):
        self._parts[number] = parts

  def drop(self, replica_ids: Iterable[int]) -> None:
    """Forgets replicas; ignores those it does not have."""
    with self._lock:
      for replica_id in replica_ids:
        for part in self._parts.pop(replica_id, ()):
          self._used_bytes -= part.num_bytes

  def _name(self, replica_id: int) -> str:
    return f'segment {self.name!r} replica {replica_id}'


def with_checksum(part: Part) -> Part:
  """The part with a checksum; one that it has already stays."""
  if part.total is not None:
    return part
  return part._replace(total=checksum(map(raw_bytes, part.slices)))


def verify(part: Part, title: str) -> None:
  """Raises ChecksumError if it has a checksum that is not its bytes'."""
  if part.total is None:
    return
  if checksum(map(raw_bytes, part.slices)) != part.total:
    layers = (part.start_layer, part.stop_layer)
    raise ChecksumError(f'{title}: {layers=} fail their checksum')


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
  """Whether two layer ranges [start, stop) share a layer."""
  return a[0] < b[1] and b[0] < a[1]


def covering(
  ranges: Iterable[tuple[int, int]],
  start_layer: int,
  stop_layer: int,
  title: str,
) -> tuple[tuple[int, int], ...]:
  """The ranges that hold [start_layer, stop_layer), lowest first.

  Raises:
    LookupError: some of these layers are in none; the message begins with
      `title`.
  """
  wanted = (start_layer, stop_layer)
  held = tuple(sorted(layers for layers in ranges if overlap(layers, wanted)))
  at = start_layer
  for start, stop in held:
    if start > at:
      break
    at = stop
  if at < stop_layer:
    raise LookupError(f'{title}: layer {at} is not here')
  return held
