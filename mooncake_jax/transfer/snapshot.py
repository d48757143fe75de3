# SPDX-License-Identifier: Apache-2.0
"""Blocks of pinned host memory as an Orbax checkpoint, and back.

A checkpoint is a tree of bytes, by segment:

  {'prefill0': {'keys': uint8 [n, 32], 'totals': uint64 [n],
                'blocks': {'000000': uint8 [m, block bytes], ...}}}

with the `PoolFormat` as its metadata. Blocks stand in the order of the keys,
so many to an array that it has about `ARRAY_BYTES`. Orbax finishes a
checkpoint at once or not at all: a kill leaves the one before.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.checksum import checksum
from mooncake_jax.transfer.checksum import raw_bytes
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.snapshot_spec import PoolFormat

ARRAY_BYTES = 64 << 20
KEY_BYTES = 32
# A block's parts, lowest layers first; they have all layers.
Blocks = Sequence[tuple[BlockKey, tuple[Part, ...]]]


def save(
  path: str, pools: Mapping[str, Blocks], pool_format: PoolFormat
) -> None:
  """Writes a snapshot and, once it is whole, removes the one before.

  Without any block it does nothing.
  """
  tree = {name: _tree(blocks) for name, blocks in pools.items() if blocks}
  if not tree:
    return
  with _checkpointer(path) as checkpoints:
    latest = checkpoints.latest
    step = 0 if latest is None else latest.step + 1
    checkpoints.save(step, tree, custom_metadata=asdict(pool_format))


def load(
  path: str, pool_format: PoolFormat
) -> dict[str, list[tuple[BlockKey, np.ndarray]]]:
  """Blocks [L, 2, S, K, H] of the newest snapshot by segment; {} if none.

  A block whose bytes fail their checksum is left out.

  Raises:
    ValueError: it is of another format; names the field and both values.
  """
  with _checkpointer(path) as checkpoints:
    latest = checkpoints.latest
    if latest is None:
      return {}
    saved = checkpoints.metadata(latest.step)
    found: Any = saved.custom_metadata
    _check(f'{path}/{latest.step}', found or {}, pool_format)
    tree: Any = checkpoints.load(latest.step)
  return {name: [*_blocks(pool, pool_format)] for name, pool in tree.items()}


@contextmanager
def _checkpointer(path: str) -> Iterator[ocp.training.Checkpointer]:
  """Orbax's book of checkpoints in a folder, which is made."""
  if '://' not in path:
    path = str(Path(path).resolve())
  newest: Any = ocp.training.preservation_policies.LatestN(1)
  with ocp.training.Checkpointer(
    path, preservation_policy=newest, cleanup_tmp_directories=True
  ) as checkpoints:
    yield checkpoints


def _tree(blocks: Blocks) -> dict[str, Any]:
  rows = [_bytes(parts) for _, parts in blocks]
  each = max(1, ARRAY_BYTES // len(rows[0]))
  keys = b''.join(key for key, _ in blocks)
  return {
    'keys': np.frombuffer(keys, np.uint8).reshape(len(blocks), KEY_BYTES),
    'totals': np.array([checksum([raw_bytes(r)]) for r in rows], np.uint64),
    'blocks': {
      f'{i:06}': np.stack(rows[i : i + each]) for i in range(0, len(rows), each)
    },
  }


def _bytes(parts: Iterable[Part]) -> np.ndarray:
  """Canonical bytes of a block, uint8 [n]."""
  return np.concatenate(
    [
      np.concatenate([*map(np.asarray, part.slices)], axis=3)
      .reshape(-1)
      .view(np.uint8)
      for part in parts
    ]
  )


def _blocks(
  pool: Mapping[str, Any], pool_format: PoolFormat
) -> Iterator[tuple[BlockKey, np.ndarray]]:
  arrays = [pool['blocks'][name] for name in sorted(pool['blocks'])]
  rows = (row for array in arrays for row in array)
  dtype = jax.numpy.dtype(pool_format.kv_dtype)
  for key, total, row in zip(pool['keys'], pool['totals'], rows, strict=True):
    if checksum([raw_bytes(row)]) == int(total):
      block_L2SKH = row.view(dtype).reshape(pool_format.block_shape)
      yield key.tobytes(), block_L2SKH


def _check(where: str, saved: Mapping[str, Any], wanted: PoolFormat) -> None:
  for name, value in asdict(wanted).items():
    if (was := saved.get(name)) != value:
      raise ValueError(
        f'snapshot {where}: {name}={was!r}, but this run has {name}={value!r}'
      )
