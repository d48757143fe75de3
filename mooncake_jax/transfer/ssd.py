# SPDX-License-Identifier: Apache-2.0
"""A segment on an SSD (or any store tensorstore knows), by block key.

One entry a part, '<key hex>/<start layer>-<stop layer>', with a checksum (see
`entry.py`). Entries that an earlier process left belong to the first replica
of their key that is asked for after `adopt`.

Threads: any thread may ask the index. Writes and deletions happen under one
lock, deletions first: what was dropped before a put never takes the put's
entry along, and its room is free by then.
"""

from collections.abc import Collection
from collections.abc import Iterable
import re
import threading

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.entries import open_entries
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.entry import check_header
from mooncake_jax.transfer.entry import entry_name
from mooncake_jax.transfer.entry import HEADER_BYTES
from mooncake_jax.transfer.entry import layers_of
from mooncake_jax.transfer.entry import pack
from mooncake_jax.transfer.entry import unpack
from mooncake_jax.transfer.part_index import Layers
from mooncake_jax.transfer.part_index import PartIndex
from mooncake_jax.transfer.segment import Part

# What this module and a write of it that was torn leave behind.
ENTRY = re.compile(r'((?:[0-9a-f]{2})+)/\d+-\d+(?:\.torn)?')


class SsdSegment:
  """`FarSegment` over entries at a URL. It is the only one to write there."""

  def __init__(
    self,
    name: str,
    url: str,
    capacity_bytes: int,
    block: BlockFormat,
    *,
    file_io_sync: bool = False,
    plain_files: bool = True,
  ):
    """Opens the store; what lies there is neither read nor counted yet.

    Args:
      capacity_bytes: of parts; each takes `HEADER_BYTES` more.
      block: what a whole block is; nothing else is kept.
      file_io_sync: whether a write waits for the disk.
      plain_files: False serves `file://` by tensorstore as well.

    Raises:
      ValueError: it can't be opened or written; one line with the URL.
    """
    if capacity_bytes < 0:
      raise ValueError(f'segment {name!r}: {capacity_bytes=} must be >= 0')
    self.name = name
    self.capacity_bytes = capacity_bytes
    self._format = block
    self._index = PartIndex(name, capacity_bytes, block)
    self._io = threading.Lock()
    try:
      self._entries = open_entries(url, file_io_sync, plain_files)
    except ValueError as error:
      raise ValueError(f'segment {name!r}: {error}') from None

  @property
  def used_bytes(self) -> int:
    """Bytes of parts written or being written."""
    return self._index.used_bytes

  def adopt(self) -> list[tuple[BlockKey, int]]:
    """Takes over the whole blocks of an earlier process, as (key, bytes).

    Deletes the rest: torn writes, blocks that lack layers or are of another
    shape or dtype, and what exceeds the capacity. Reads headers only: bytes
    are checked when they are read. Call it once, before the first put.
    """
    assert not self._index.used_bytes, 'adopt comes before the first put'
    by_key: dict[BlockKey, list[str]] = {}
    for name in self._entries.names():
      if found := ENTRY.fullmatch(name):
        by_key.setdefault(bytes.fromhex(found[1]), []).append(name)
    adopted = []
    for key, names in by_key.items():
      parts = sorted(layers_of(name) for name in names if self._is_whole(name))
      if num_bytes := self._index.adopt(key, parts):
        adopted.append((key, num_bytes))
        names = set(names) - {entry_name(key, *layers) for layers in parts}
      self._index.still_forgotten(set(names))
    self.sweep()
    return adopted

  def keep_only(self, keys: Collection[BlockKey]) -> None:
    """Forgets all other blocks; those wait to be asked for, as if adopted."""
    self._index.keep_only(keys)

  def store(self, replica: Replica, part: Part) -> None:
    """See `FarSegment`."""
    layers = (part.start_layer, part.stop_layer)
    self._format.check(part)
    with self._io:
      self._sweep()
      name = self._index.claim(replica, layers)
      try:
        self._entries.write(name, pack(name, part, self._format))
      except BaseException:
        self.forget(replica, layers)
        raise

  def keep(self, replica: Replica, layers: Layers) -> None:
    """See `FarSegment`."""
    self._index.keep(replica, layers)

  def forget(self, replica: Replica, layers: Layers) -> None:
    """See `FarSegment`."""
    self._index.forget(replica, layers)

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    """See `FarSegment`."""
    return self._index.ranges(replica, start_layer, stop_layer)

  def read(self, replica: Replica, layers: Layers) -> Part:
    """See `FarSegment`."""
    name = entry_name(replica.key, *layers)
    try:
      part = unpack(name, self._entries.read(name), self._format)
    except (ChecksumError, LookupError):
      self.forget(replica, layers)
      raise
    self.ranges(replica, *layers)  # it was this replica's all the time
    return part

  def drop(self, replicas: Iterable[Replica]) -> None:
    """See `FarSegment`."""
    self._index.drop(replicas)

  def sweep(self) -> None:
    """See `FarSegment`."""
    with self._io:
      self._sweep()

  def close(self) -> None:
    """Lets go of the store; deletes what was forgotten before."""
    with self._io:
      self._sweep()
      self._entries.close()

  def _sweep(self) -> None:
    """Deletes what was forgotten; what can't be is tried again later."""
    left, failed = {*self._index.take_forgotten()}, set()
    while left:
      name = left.pop()
      try:
        self._entries.delete(name)
      except TimeoutError:  # nor would the others be answered
        failed |= {name, *left}
        break
      except (OSError, ValueError):
        failed.add(name)
    self._index.still_forgotten(failed)

  def _is_whole(self, name: str) -> bool:
    """Whether an entry has the right header and length."""
    if name.endswith('.torn'):
      return False
    layers = layers_of(name)
    try:
      check_header(name, self._entries.head(name, HEADER_BYTES), self._format)
    except (ChecksumError, OSError):
      return False
    num_bytes = HEADER_BYTES + self._format.num_bytes(*layers)
    return self._entries.has(name, num_bytes)
