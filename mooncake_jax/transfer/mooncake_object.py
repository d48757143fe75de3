# SPDX-License-Identifier: Apache-2.0
"""A block as one object of the Mooncake Store.

    bytes [L, 2, S, K, H] canonical | magic 8 | XXH3-64 of name and bytes 8

The name that is hashed has key, dtype and shape in it: a torn, flipped or
mixed-up object, or one of another shape, is never data.
"""

from collections.abc import Iterable

import numpy as np

from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.checksum import checksum
from mooncake_jax.transfer.checksum import raw_bytes
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.segment import Part

MAGIC = b'MOONKVR\x01'
SEAL_BYTES = 16


class ObjectFormat:
  """Objects of one kind of block, in memory of their size."""

  def __init__(self, block: BlockFormat):
    self.block = block
    self._shape = block.shape(0, block.num_layers)
    self._block_bytes = block.num_bytes(0, block.num_layers)
    self.num_bytes = self._block_bytes + SEAL_BYTES

  def view(self, slot: np.ndarray) -> np.ndarray:
    """The block [L, 2, S, K, H] in an object, uint8 [num_bytes]."""
    return slot[: self._block_bytes].view(self.block.dtype).reshape(self._shape)

  def gather(
    self, slot: np.ndarray, key: BlockKey, parts: Iterable[Part]
  ) -> None:
    """Writes parts that are a whole block into an object and seals it."""
    block_L2SKH = self.view(slot)
    for part in parts:
      layers, start_head = block_L2SKH[part.start_layer : part.stop_layer], 0
      for array in part.slices:
        stop_head = start_head + array.shape[3]
        np.copyto(layers[:, :, :, start_head:stop_head], array)
        start_head = stop_head
    seal = np.frombuffer(self._seal(slot, key), np.uint8)
    slot[self._block_bytes :] = seal

  def is_sealed(self, slot: np.ndarray, key: BlockKey) -> bool:
    """Whether these are the bytes that were put as this block."""
    return slot[self._block_bytes :].tobytes() == self._seal(slot, key)

  def _seal(self, slot: np.ndarray, key: BlockKey) -> bytes:
    name = f'{key.hex()} {self.block.dtype.name} {self._shape}'.encode()
    data = raw_bytes(slot[: self._block_bytes])
    return MAGIC + checksum((name, data)).to_bytes(8, 'little')
