# SPDX-License-Identifier: Apache-2.0
"""Which parts of which blocks a persistent segment has, and whose they are.

Kept by key, for names on the medium say no more. A part has a place from
`claim` on, is readable from `keep` on, and its name goes to `forgotten` when
it is removed, until somebody has deleted it. Any thread may call.
"""

from collections.abc import Collection
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
import threading

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.entry import entry_name
from mooncake_jax.transfer.segment import covering
from mooncake_jax.transfer.segment import overlap

Layers = tuple[int, int]


@dataclass
class _Block:
  """Parts of one key: layers -> whether they are readable.

  Attributes:
    replica_id: whose they are; None for one adopted and not yet asked for.
  """

  replica_id: int | None
  parts: dict[Layers, bool] = field(default_factory=dict)


class PartIndex:
  """Parts within a capacity."""

  def __init__(self, name: str, capacity_bytes: int, block: BlockFormat):
    self._name = name
    self._capacity_bytes = capacity_bytes
    self._format = block
    self._lock = threading.Lock()
    self._blocks: dict[BlockKey, _Block] = {}
    self._forgotten: set[str] = set()
    self.used_bytes = 0

  def adopt(self, key: BlockKey, parts: list[Layers]) -> int:
    """Enters a whole block of an earlier process; returns its bytes.

    0 if it lacks layers or exceeds the capacity.
    """
    at = 0
    for start, stop in parts:
      at = stop if start == at else self._format.num_layers + 1
    num_bytes = sum(self._format.num_bytes(*layers) for layers in parts)
    with self._lock:
      is_whole = at == self._format.num_layers
      if not is_whole or num_bytes > self._capacity_bytes - self.used_bytes:
        return 0
      self._blocks[key] = _Block(None, dict.fromkeys(parts, True))
      self.used_bytes += num_bytes
    return num_bytes

  def claim(self, replica: Replica, layers: Layers) -> str:
    """Gives a part its room and name.

    Raises:
      ValueError: there is no room, or these layers are there already.
    """
    title, num_bytes = self._title(replica), self._format.num_bytes(*layers)
    if not replica.key:
      raise ValueError(f'{title} has no key')
    name = entry_name(replica.key, *layers)
    with self._lock:
      block = self._find(replica)
      if block is None and replica.key in self._blocks:
        raise ValueError(f'{title}: the key is there already, of another')
      for other in block.parts if block else ():
        if overlap(other, layers):
          raise ValueError(f'{title}: {layers=} are there already')
      free_bytes = self._capacity_bytes - self.used_bytes
      if num_bytes > free_bytes:
        raise ValueError(
          f'{title}: {num_bytes=} exceed the {free_bytes} free '
          f'of capacity_bytes={self._capacity_bytes}'
        )
      block = self._blocks.setdefault(replica.key, _Block(replica.replica_id))
      block.parts[layers] = False
      self.used_bytes += num_bytes
      self._forgotten.discard(name)  # could not be deleted: is replaced now
    return name

  def keep(self, replica: Replica, layers: Layers) -> None:
    """Makes a claimed part readable."""
    with self._lock:
      self._blocks[replica.key].parts[layers] = True

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    """See `FarSegment`."""
    with self._lock:
      block = self._find(replica)
      parts = block.parts if block else {}
      readable = [layers for layers, is_kept in parts.items() if is_kept]
    return covering(readable, start_layer, stop_layer, self._title(replica))

  def forget(self, replica: Replica, layers: Layers) -> None:
    """Removes a part; ignores one that is not the replica's."""
    with self._lock:
      block = self._find(replica)
      if block is not None and layers in block.parts:
        self._remove(replica.key, block, layers)

  def drop(self, replicas: Iterable[Replica]) -> None:
    """Removes all parts of replicas; ignores unknown ones."""
    with self._lock:
      for replica in replicas:
        block = self._find(replica)
        if block is not None:
          for layers in [*block.parts]:
            self._remove(replica.key, block, layers)

  def keep_only(self, keys: Collection[BlockKey]) -> None:
    """Removes all others; those wait to be asked for, as if adopted."""
    with self._lock:
      for key, block in [*self._blocks.items()]:
        if key in keys:
          block.replica_id = None
          continue
        for layers in [*block.parts]:
          self._remove(key, block, layers)

  def take_forgotten(self) -> set[str]:
    """Names to be deleted now."""
    with self._lock:
      names, self._forgotten = self._forgotten, set()
      return names

  def still_forgotten(self, names: set[str]) -> None:
    """Names that could not be deleted."""
    with self._lock:
      self._forgotten |= names

  def _find(self, replica: Replica) -> _Block | None:
    """The replica's block; the lock is held."""
    block = self._blocks.get(replica.key)
    if block is not None and block.replica_id is None:
      block.replica_id = replica.replica_id
    if block is None or block.replica_id != replica.replica_id:
      return None
    return block

  def _remove(self, key: BlockKey, block: _Block, layers: Layers) -> None:
    del block.parts[layers]
    if not block.parts:
      del self._blocks[key]
    self.used_bytes -= self._format.num_bytes(*layers)
    self._forgotten.add(entry_name(key, *layers))

  def _title(self, replica: Replica) -> str:
    return f'segment {self._name!r} replica {replica.replica_id}'
