# SPDX-License-Identifier: Apache-2.0
"""A segment: an instance's registered pinned host memory, by replica.

The Master decides what lies here; the segment only keeps, gives, forgets and
refuses what does not fit. Any thread may call it.
"""

from collections.abc import Iterable
import threading
from typing import NamedTuple

from mooncake_jax.transfer.heads import HeadSlices


class Part(NamedTuple):
  """Layers [start_layer, stop_layer) of a block, as slices of its heads."""

  start_layer: int
  stop_layer: int
  slices: HeadSlices

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
    name = f'segment {self.name!r} replica {replica_id}'
    layers = (part.start_layer, part.stop_layer)
    with self._lock:
      for other in self._parts.get(replica_id, ()):
        if _overlap(other, *layers):
          raise ValueError(f'{name}: {layers=} are there already')
      free_bytes = self.capacity_bytes - self._used_bytes
      if part.num_bytes > free_bytes:
        raise ValueError(
          f'{name}: num_bytes={part.num_bytes} exceed the {free_bytes} free '
          f'of capacity_bytes={self.capacity_bytes}'
        )
      self._parts.setdefault(replica_id, []).append(part)
      self._used_bytes += part.num_bytes

  def read(
    self, replica_id: int, start_layer: int, stop_layer: int
  ) -> tuple[Part, ...]:
    """Returns the parts that hold the layers, lowest first.

    The first and the last may hold more. They stay readable when dropped.

    Raises:
      LookupError: some of these layers are not here.
    """
    with self._lock:
      parts = sorted(
        (
          part
          for part in self._parts.get(replica_id, ())
          if _overlap(part, start_layer, stop_layer)
        ),
        key=lambda part: part.start_layer,
      )
    at = start_layer
    for part in parts:
      if part.start_layer > at:
        break
      at = part.stop_layer
    if at < stop_layer:
      raise LookupError(
        f'segment {self.name!r} replica {replica_id}: layer {at} is not here'
      )
    return tuple(parts)

  def drop(self, replica_ids: Iterable[int]) -> None:
    """Forgets replicas; ignores those it does not have."""
    with self._lock:
      for replica_id in replica_ids:
        for part in self._parts.pop(replica_id, ()):
          self._used_bytes -= part.num_bytes


def _overlap(part: Part, start_layer: int, stop_layer: int) -> bool:
  return part.start_layer < stop_layer and start_layer < part.stop_layer
