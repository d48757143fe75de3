# SPDX-License-Identifier: Apache-2.0
"""A store that processes share in a folder: a file a block.

Where the wheel of the real one is not installed. Blocks are its objects, seal
and all; whoever has the folder may take files away, or all of it.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
import os
from pathlib import Path

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.far import Layers
from mooncake_jax.transfer.mooncake_object import ObjectFormat
from mooncake_jax.transfer.segment import Part


@dataclass(frozen=True)
class FolderSource:
  """See `worker.StoreSource`."""

  path: str

  def open(self, block: BlockFormat, host: str) -> 'FolderSegment':
    return FolderSegment(Path(self.path), block)


class FolderSegment:
  """`SharedSegment`; a block that is not whole yet is in memory."""

  name = REMOTE
  capacity_bytes = 1 << 40
  used_bytes = 0

  def __init__(self, path: Path, block: BlockFormat):
    self._path = path
    self._format = ObjectFormat(block)
    self._parts: dict[int, dict[Layers, Part]] = {}

  def store(self, replica: Replica, part: Part) -> None:
    held = self._parts.setdefault(replica.replica_id, {})
    layers = part.start_layer, part.stop_layer
    if layers in held:
      raise ValueError(f'{replica}: {layers=} are there already')
    held[layers] = part
    num_layers = sum(stop - start for start, stop in held)
    if num_layers == self._format.block.num_layers:
      slot = np.empty(self._format.num_bytes, np.uint8)
      self._format.gather(slot, replica.key, held.values())
      new = self._path / f'{replica.key.hex()}.{os.getpid()}'
      new.write_bytes(slot.tobytes())
      new.rename(self._file(replica.key))

  def keep(self, replica: Replica, layers: Layers) -> None:
    pass

  def forget(self, replica: Replica, layers: Layers) -> None:
    self._parts.get(replica.replica_id, {}).pop(layers, None)

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    return ((start_layer, stop_layer),)

  def read(self, replica: Replica, layers: Layers) -> Part:
    try:
      slot = np.fromfile(self._file(replica.key), np.uint8)
    except FileNotFoundError as error:
      raise LookupError(f'{replica} is not there') from error
    if not self._format.is_sealed(slot, replica.key):
      raise ChecksumError(f'{replica}')
    return Part(*layers, (self._format.view(slot)[slice(*layers)],))

  def drop(self, replicas: Iterable[Replica]) -> None:
    for replica in replicas:
      self._parts.pop(replica.replica_id, None)

  def sweep(self) -> None:
    pass

  def reset(self) -> None:
    self._parts = {}

  def exists(
    self, keys: Sequence[BlockKey], timeout_s: float | None = None
  ) -> list[bool]:
    if not self._path.is_dir():
      raise TimeoutError(f'{self._path} does not answer')
    return [self._file(key).exists() for key in keys]

  def close(self) -> None:
    pass

  def _file(self, key: BlockKey) -> Path:
    return self._path / key.hex()
