# SPDX-License-Identifier: Apache-2.0
"""Block keys: a hash chain that names a block by all tokens up to its end.

The chain is the public `sha256_cbor` one of vLLM and of Mooncake's indexer,
so keys agree across processes and with those systems:

  root  = SHA-256(CBOR text(identity))
  key_i = SHA-256(CBOR [key_{i-1}, [tokens of block i], extra_i])

where extra_i is null, or a list of the LoRA name (every block) and the salt
(block 0 only). As in FAST'25 section 3.2.1: a key names the whole prefix.
"""

from collections.abc import Sequence
import hashlib

import numpy as np

from mooncake_jax.request import BlockKey


def prefix_keys(
  tokens: np.ndarray,
  block_size_tokens: int,
  identity: str = '0',
  lora: str | None = None,
  salt: str | None = None,
  known: Sequence[BlockKey] = (),
) -> tuple[BlockKey, ...]:
  """Returns the 32-byte keys of all complete blocks, first block first.

  Args:
    tokens: int [T], each in [0, 2**32).
    block_size_tokens: tokens a block.
    identity: names what the KVCache depends on beside tokens (model, dtype);
      '0' reproduces the published vectors.
    lora: adapter name, part of every block.
    salt: separates one tenant's blocks from all others'.
    known: keys of the first blocks, which are not hashed again.
  """
  if block_size_tokens < 1:
    raise ValueError(f'{block_size_tokens=} must be >= 1')
  num_blocks = len(tokens) // block_size_tokens
  keys = [*known[:num_blocks]]
  first = len(keys)
  body, ends = _encode_uints(
    tokens[first * block_size_tokens : num_blocks * block_size_tokens]
  )
  key = keys[-1] if keys else hashlib.sha256(_text(identity)).digest()
  head = _head(4, block_size_tokens)
  start = 0
  for i in range(first, num_blocks):
    stop = int(ends[(i - first + 1) * block_size_tokens - 1])
    extra = _extra(lora, salt if i == 0 else None)
    item = b'\x83\x58\x20' + key + head + body[start:stop] + extra
    key = hashlib.sha256(item).digest()
    keys.append(key)
    start = stop
  return tuple(keys)


def low64(key: BlockKey) -> int:
  """The 64-bit form that indexers publish: the last 8 bytes, big-endian."""
  return int.from_bytes(key[-8:], 'big')


def _head(major: int, value: int) -> bytes:
  """The shortest CBOR head of a major type (RFC 8949 section 3)."""
  if value < 24:
    return bytes([major << 5 | value])
  for code, size in ((24, 1), (25, 2), (26, 4)):
    if value < 1 << (8 * size):
      return bytes([major << 5 | code]) + value.to_bytes(size, 'big')
  raise ValueError(f'{value=} does not fit 32 bits')


def _text(value: str) -> bytes:
  data = value.encode()
  return _head(3, len(data)) + data


def _extra(lora: str | None, salt: str | None) -> bytes:
  items = [_text(item) for item in (lora, salt) if item]
  return _head(4, len(items)) + b''.join(items) if items else b'\xf6'


def _encode_uints(tokens: np.ndarray) -> tuple[bytes, np.ndarray]:
  """CBOR of each token in a row, and where each token's bytes end.

  Five tokens [1, 30, 300, 70000, 23] take 1, 2, 3, 5 and 1 bytes.
  """
  wide = np.asarray(tokens, np.int64)
  if wide.size and (wide.min() < 0 or wide.max() >= 1 << 32):
    bad = wide[(wide < 0) | (wide >= 1 << 32)][0]
    raise ValueError(f'token id {bad} is not in [0, 2**32)')
  size = np.select([wide < 24, wide < 1 << 8, wide < 1 << 16], [1, 2, 3], 5)
  big_endian = wide.astype('>u4').view(np.uint8).reshape(-1, 4)
  head = np.select([size == 2, size == 3, size == 5], [24, 25, 26], wide)
  rows = np.concatenate([head[:, None].astype(np.uint8), big_endian], axis=1)
  # A token of n value bytes keeps its head and the last n of the four.
  column = np.arange(5)[None, :]
  kept = (column == 0) | (column > 5 - size[:, None])
  return rows[kept].tobytes(), np.cumsum(size)
