# SPDX-License-Identifier: Apache-2.0
"""Blocks to and from SSD through the engine, against plain files.

One turn moves the same bytes four ways, so what else the machine does hits
all of them. Plain files are written from and read into arrays as they are,
with no checksum; both leave it to the kernel when the disk writes. A plain
read is into memory mapped for it, as a store's new block is; what reading
again into the same buffer gives stands beside it. The best turn of each
counts: what else the machine does only adds time.
"""

from pathlib import Path
import tempfile

import numpy as np

from mooncake_jax.backend import Replica
from scripts.benches.bare import read_file
from scripts.benches.bare import write_file
from scripts.benches.rows import Row
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import blocks_of
from scripts.benches.transfers import NAME

TOKENS = (92, 365, 1426)  # 4, 16 and 64 MiB, rounded to pages below
SHARE = 0.5


def ssd(quick: bool) -> list[Row]:
  """Ratios to plain files for blocks of 4 to 64 MiB."""
  rows = []
  for tokens in TOKENS:
    block_tokens = -(-tokens // 64) * 64
    with tempfile.TemporaryDirectory() as folder:
      at = Path(folder) / 'blocks'
      at.mkdir()
      with blocks_of(
        block_tokens,
        host_bytes=1 << 29,
        ssd_url=at.as_uri(),
        ssd_bytes=1 << 30,
      ) as blocks:
        rows += _case(blocks, Path(folder), 5 if quick else 15)
  return rows


def _case(blocks: Blocks, folder: Path, turns: int) -> list[Row]:
  key = b'k' * 32
  block = np.ones(blocks.layout.block_bytes // 4, np.float32)
  times: dict[str, list[float]] = {}
  warm = np.ones_like(block)
  for turn in range(turns + 1):
    host, back = Replica(NAME, 2 * turn), Replica(NAME, 2 * turn + 1)
    far = Replica(f'{NAME}/ssd', turn, key)
    blocks.move(blocks.ops(blocks.pages(turn), host))
    took = {
      'plain_write': write_file(folder / 'plain', block),
      'write': blocks.move(blocks.ops(host, far))[0],
      'plain_read': read_file(folder / 'plain', None),
      'warm_read': read_file(folder / 'plain', warm),
      'read': blocks.move(blocks.ops(far, back))[0],
      'onload': blocks.move(blocks.ops(far, blocks.pages(turn)))[0],
    }
    blocks.backend.drop((host, back, far))
    (folder / 'plain').unlink()
    if turn:  # the first opens files and compiles
      for way, seconds in took.items():
        times.setdefault(way, []).append(seconds)
  best = {way: min(seconds) for way, seconds in times.items()}
  num_bytes = blocks.layout.block_bytes
  rows = [
    row
    for way in ('write', 'read', 'onload')
    for row in _rows(num_bytes, way, best)
  ]
  speed = num_bytes / best['warm_read']
  name = f'ssd.plain_read_warm.{num_bytes / (1 << 20):.0f}MiB.bytes_per_s'
  return [*rows, Row(name, speed, 'B/s', 'into the same buffer again')]


def _rows(num_bytes: int, way: str, best: dict[str, float]) -> list[Row]:
  name = f'ssd.{way}.{num_bytes / (1 << 20):.0f}MiB'
  plain = 'plain_write' if way == 'write' else 'plain_read'
  return [
    Row(f'{name}.bytes_per_s', num_bytes / best[way], 'B/s'),
    Row(f'{name}.plain_bytes_per_s', num_bytes / best[plain], 'B/s', plain),
    Row(
      f'{name}.plain_share',
      best[plain] / best[way],
      'ratio',
      f'{plain} in the same loop',
      target=SHARE,
    ),
  ]
