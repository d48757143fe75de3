# SPDX-License-Identifier: Apache-2.0
"""One part of a block as an entry of a key-value store: header, then bytes.

    0     8        10          12     16    20     36     56         64
    magic version  num_slices  start  stop  dtype  shape  num_bytes  checksum
    72 zeros up to HEADER_BYTES, then the slices one after the other

Little endian. `shape` is the part's, [L, 2, S, K, H]; each of `num_slices`
slices is [L, 2, S, K / num_slices, H], so a part of one slice is canonical
bytes. The checksum is over the entry's name, the header with a checksum of 0,
and the bytes: a torn, truncated, flipped or misplaced entry is never data.
"""

from dataclasses import dataclass
import struct

import numpy as np
import numpy.typing as npt

from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.checksum import checksum
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.checksum import raw_bytes
from mooncake_jax.transfer.segment import Part

HEADER_BYTES = 128  # bytes after it stay aligned to cache lines
MAGIC = b'MOONKVC\0'
VERSION = 1
HEADER = struct.Struct('<8sHHII16s5IQQ')


@dataclass(frozen=True)
class BlockFormat:
  """What a whole block is: [num_layers, 2, tokens, heads, head_dim]."""

  num_layers: int
  num_tokens: int
  num_kv_heads: int
  head_dim: int
  dtype: np.dtype

  @classmethod
  def of(
    cls, config: ModelConfig, num_tokens: int, dtype: npt.DTypeLike
  ) -> 'BlockFormat':
    """Of a model's blocks of so many tokens."""
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim
    return cls(L, num_tokens, K, H, np.dtype(dtype))

  def shape(self, start_layer: int, stop_layer: int) -> tuple[int, ...]:
    """Shape [L, 2, S, K, H] of a part."""
    L, S = stop_layer - start_layer, self.num_tokens
    return L, 2, S, self.num_kv_heads, self.head_dim

  def num_bytes(self, start_layer: int, stop_layer: int) -> int:
    shape = self.shape(start_layer, stop_layer)
    return int(np.prod(shape)) * self.dtype.itemsize

  def check(self, part: Part) -> None:
    """Raises ValueError unless the part is one of such a block."""
    L, two, S, _, H = part.slices[0].shape
    K = sum(array.shape[3] for array in part.slices)
    layers = (part.start_layer, part.stop_layer)
    dtypes = {np.dtype(array.dtype) for array in part.slices}
    if dtypes != {self.dtype} or (L, two, S, K, H) != self.shape(*layers):
      raise ValueError(
        f'a part of shape={(L, two, S, K, H)} dtype={dtypes.pop().name} is no '
        f'part of a block {self.shape(*layers)} {self.dtype.name}'
      )


def pack(name: str, part: Part, block: BlockFormat) -> tuple[memoryview, ...]:
  """The entry as byte arrays to be written one after the other."""
  pieces = tuple(raw_bytes(array) for array in part.slices)
  fields = _fields(name, len(pieces), block)
  total = checksum((name.encode(), _header(fields, 0), *pieces))
  return memoryview(_header(fields, total)), *pieces


def check_header(name: str, header: bytes, block: BlockFormat) -> int:
  """Returns the number of slices of an entry that this header begins.

  Raises:
    ChecksumError: it is not the header of that part of such a block.
  """
  if len(header) < HEADER_BYTES:
    raise ChecksumError(f'entry {name!r} is torn: {len(header)} bytes')
  num_slices = HEADER.unpack_from(header)[2]
  expected = HEADER.pack(*_fields(name, num_slices, block), 0)
  heads = block.num_kv_heads
  if header[: len(expected) - 8] != expected[:-8] or (
    not num_slices or heads % num_slices
  ):
    found = HEADER.unpack_from(header)
    raise ChecksumError(
      f'entry {name!r} is not what was asked for: magic={found[0]!r} '
      f'version={found[1]} shape={found[6:11]} dtype={found[5]!r}, not '
      f'{block.shape(*layers_of(name))} {block.dtype.name}'
    )
  return num_slices


def unpack(name: str, entry: np.ndarray, block: BlockFormat) -> Part:
  """The part that an entry, uint8 [n], holds; its arrays share its memory.

  Raises:
    ChecksumError: it is not whole, or not what was written under `name`.
  """
  header = entry[:HEADER_BYTES].tobytes()
  num_slices = check_header(name, header, block)
  layers, data = layers_of(name), entry[HEADER_BYTES:]
  if len(data) != block.num_bytes(*layers):
    raise ChecksumError(
      f'entry {name!r} has {len(data)} bytes, not {block.num_bytes(*layers)}'
    )
  zeroed = _header(_fields(name, num_slices, block), 0)
  written = HEADER.unpack_from(header)[-1]
  if checksum((name.encode(), zeroed, raw_bytes(data))) != written or any(
    header[HEADER.size :]
  ):
    raise ChecksumError(f'entry {name!r} fails its checksum')
  L, two, S, K, H = block.shape(*layers)
  slices = data.view(block.dtype).reshape(
    num_slices, L, two, S, K // num_slices, H
  )
  return Part(*layers, tuple(slices))


def entry_name(key: bytes, start_layer: int, stop_layer: int) -> str:
  """'<key hex>/<start layer>-<stop layer>'."""
  return f'{key.hex()}/{start_layer}-{stop_layer}'


def layers_of(name: str) -> tuple[int, int]:
  """The layer range that an entry's name says."""
  start, stop = name.rsplit('/', 1)[1].split('-')
  return int(start), int(stop)


def _fields(name: str, num_slices: int, block: BlockFormat) -> tuple:
  layers = layers_of(name)
  return (
    MAGIC,
    VERSION,
    num_slices,
    *layers,
    block.dtype.name.encode(),
    *block.shape(*layers),
    block.num_bytes(*layers),
  )


def _header(fields: tuple, total: int) -> bytes:
  return HEADER.pack(*fields, total).ljust(HEADER_BYTES, b'\0')
