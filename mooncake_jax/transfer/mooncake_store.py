# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake Store as a far segment: one object a block.

The object's name is the block key in hex, which already has model, dtype and
tokens in it, so processes that never met share blocks. Parts wait here until
a block is whole, are gathered in a slot of registered memory and put from
there; a read brings the whole block into a slot, and arrays are views of it.

The store evicts by itself: what it lost is a miss. A dropped replica stays
there for others, unless the config says otherwise.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import threading

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.far import Layers
from mooncake_jax.transfer.mooncake_arena import Arena
from mooncake_jax.transfer.mooncake_calls import Calls
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_errors import BlockCorrupt
from mooncake_jax.transfer.mooncake_errors import error_of
from mooncake_jax.transfer.mooncake_member import Membership
from mooncake_jax.transfer.mooncake_object import ObjectFormat
from mooncake_jax.transfer.mooncake_reads import Reads
from mooncake_jax.transfer.segment import overlap
from mooncake_jax.transfer.segment import Part


@dataclass
class _Block:
  """A replica put from here.

  Attributes:
    parts: by layers; no array any more once the block is in the store.
  """

  key: BlockKey
  parts: dict[Layers, Part | None] = field(default_factory=dict)


class MooncakeSegment:
  """`FarSegment` in a Mooncake Store; any thread may call."""

  def __init__(
    self,
    name: str,
    config: MooncakeConfig,
    block: BlockFormat,
    capacity_bytes: int,
    waits: bool = False,
  ):
    """Joins the store.

    Args:
      capacity_bytes: of what is put from here and not dropped.
      waits: whether one that can't be joined has nothing until it can.

    Raises:
      ImportError, StoreUnreachable, StoreTimeout: see `Membership`.
    """
    self.name = name
    self.capacity_bytes = capacity_bytes
    self._config = config
    self._block = block
    self._object = ObjectFormat(block)
    self._membership = Membership(config, self._object.num_bytes, waits)
    self._reads = Reads(config.staging_blocks // 2)
    self._lock = threading.Lock()
    self._blocks: dict[int, _Block] = {}
    self._dropped: set[BlockKey] = set()
    self._used_bytes = 0

  @property
  def _calls(self) -> Calls:
    return self._membership.get().calls

  @property
  def _arena(self) -> Arena:
    return self._membership.get().arena

  @property
  def used_bytes(self) -> int:
    """Bytes put from here, and parts that wait for their block's others."""
    return self._used_bytes

  def store(self, replica: Replica, part: Part) -> None:
    """See `FarSegment`; the part that makes a block whole puts it.

    Raises:
      MooncakeError: it was not put.
    """
    self._block.check(part)
    on_host = tuple(np.asarray(array) for array in part.slices)
    whole = self._hold(replica, part._replace(slices=on_host))
    if whole is None:
      return
    try:
      self._put(replica, whole)
    except BaseException:
      self.forget(replica, (part.start_layer, part.stop_layer))
      raise
    with self._lock:
      if replica.replica_id in self._blocks:
        held = self._blocks[replica.replica_id].parts
        held.update(dict.fromkeys(held))

  def keep(self, replica: Replica, layers: Layers) -> None:
    """See `FarSegment`; a block is readable when it is whole."""

  def forget(self, replica: Replica, layers: Layers) -> None:
    """See `FarSegment`."""
    with self._lock:
      block = self._blocks.get(replica.replica_id)
      if block is not None and layers in block.parts:
        del block.parts[layers]
        self._used_bytes -= self._block.num_bytes(*layers)
        if not block.parts:
          del self._blocks[replica.replica_id]

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    """See `FarSegment`; whether the store still has it shows at the read."""
    if not replica.key:
      raise LookupError(f'{self._title(replica)} has no key')
    return ((start_layer, stop_layer),)

  def read(self, replica: Replica, layers: Layers) -> Part:
    """See `FarSegment`; brings the whole block and keeps it for its parts.

    Raises:
      MooncakeError: it did not come; `BlockMissing` if it is not there.
    """
    block_L2SKH = self._reads.get(
      replica.replica_id, layers, lambda: self._get(replica.key)
    )
    return Part(*layers, (block_L2SKH[layers[0] : layers[1]],))

  def drop(self, replicas: Iterable[Replica]) -> None:
    """See `FarSegment`."""
    for replica in replicas:
      self._reads.forget(replica.replica_id)
      with self._lock:
        block = self._blocks.pop(replica.replica_id, _Block(b''))
        for layers in block.parts:
          self._used_bytes -= self._block.num_bytes(*layers)
        if self._config.remove_on_drop and replica.key:
          self._dropped.add(replica.key)

  def sweep(self) -> None:
    """See `FarSegment`; a block that others read stays."""
    with self._lock:
      keys, self._dropped = self._dropped, set()
    self.remove([*keys])

  def reset(self) -> None:
    """See `SharedSegment`."""
    self._reads.reset()
    with self._lock:
      self._blocks, self._used_bytes = {}, 0

  def exists(
    self, keys: Sequence[BlockKey], timeout_s: float | None = None
  ) -> list[bool]:
    """Which blocks the store has, whoever put them.

    Those there are under its lease from now on, 10 s by default.

    Raises:
      MooncakeError: it did not answer in `timeout_s`, or the config's.
    """
    return self._calls.exists(keys, timeout_s)

  def remove(self, keys: Sequence[BlockKey], force: bool = False) -> int:
    """Removes blocks, those that others read only by force; says how many."""
    return sum(code == 0 for code in self._calls.remove(keys, force))

  def close(self) -> None:
    """Leaves the store; arrays that were read stay valid."""
    self._reads.clear()
    self._membership.close()

  def _hold(self, replica: Replica, part: Part) -> list[Part] | None:
    """Keeps a part; returns all of them if they are the whole block."""
    title, layers = self._title(replica), (part.start_layer, part.stop_layer)
    if not replica.key:
      raise ValueError(f'{title} has no key')
    with self._lock:
      block = self._blocks.get(replica.replica_id) or _Block(replica.key)
      if any(overlap(other, layers) for other in block.parts):
        raise ValueError(f'{title}: {layers=} are there already')
      if self._used_bytes + part.num_bytes > self.capacity_bytes:
        raise ValueError(
          f'{title}: num_bytes={part.num_bytes} and used_bytes='
          f'{self._used_bytes} exceed capacity_bytes={self.capacity_bytes}'
        )
      self._used_bytes += part.num_bytes
      self._blocks[replica.replica_id] = block
      block.parts[layers] = part
      held = [part for part in block.parts.values() if part is not None]
    num_layers = sum(part.stop_layer - part.start_layer for part in held)
    return held if num_layers == self._block.num_layers else None

  def _put(self, replica: Replica, parts: list[Part]) -> None:
    slot = self._take_slot()
    self._object.gather(slot, replica.key, parts)
    code = self._calls.put(replica.key, slot)
    if code < 0:
      raise error_of(code, self._title(replica))

  def _get(self, key: BlockKey) -> np.ndarray:
    """Brings a block, [L, 2, S, K, H]; its memory is nobody else's."""
    slot = self._take_slot()
    title = f'segment {self.name!r} block {key.hex()}'
    code = self._calls.get(key, slot)
    if code < 0:
      raise error_of(code, title)
    if code != slot.nbytes:
      why = f'it has {code} bytes, not {slot.nbytes}'
    elif not self._object.is_sealed(slot, key):
      why = 'it fails its checksum'
    else:
      return self._object.view(slot)
    self.remove([key], force=True)  # else no put could ever replace it
    raise BlockCorrupt(f'{title}: {why}; removed')

  def _take_slot(self) -> np.ndarray:
    arena = self._arena
    if not arena.num_free:
      self._reads.clear()
    return arena.take(self._config.timeout_s)

  def _title(self, replica: Replica) -> str:
    return f'segment {self.name!r} replica {replica.replica_id}'
