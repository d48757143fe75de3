# SPDX-License-Identifier: Apache-2.0
"""Blocks over each link of the transfer engine, by size, batch and depth.

Through register / allocate_batch / submit / wait / free_batch, with no Master;
beside `device_put`, memcpy and plain file I/O of the same bytes in the same
loop. Plain reads are into a warm buffer and into memory mapped anew.
"""

from collections.abc import Callable
import math
from pathlib import Path
from statistics import median
import tempfile
import time
from typing import Any

import numpy as np

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from scripts.benches.bare import Bare
from scripts.benches.bare import Memcpy
from scripts.benches.bare import read_file
from scripts.benches.bare import write_file
from scripts.benches.rows import Row
from scripts.benches.sweep import modes
from scripts.benches.sweep import rows_of
from scripts.benches.sweep import sizes
from scripts.benches.sweep import small_blocks
from scripts.benches.sweep import SSD_BYTES
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import blocks_of
from scripts.benches.transfers import NAME

HOST_BYTES = 512 << 20
SUBMIT_S = 0.5e-3
Place = DevicePages | Replica


def transfer(quick: bool) -> list[Row]:
  """Bytes a second of each link and of plain means; how soon submit returns."""
  rows = []
  for name, size in sizes(quick).items():
    with tempfile.TemporaryDirectory() as folder:
      at = Path(folder) / 'blocks'
      at.mkdir()
      with small_blocks(
        size, host_bytes=HOST_BYTES, ssd_url=at.as_uri(), ssd_bytes=SSD_BYTES
      ) as blocks:
        loop = Loop(blocks, Path(folder))
        for mode in modes(quick, size):
          times = loop.times(*mode, 5 if quick else 20)
          rows += rows_of('transfer', name, size, mode, times)
  with blocks_of(128, 10, host_bytes=HOST_BYTES) as blocks:
    rows += [_submit(blocks, num_ops) for num_ops in (1, 24)]
  return rows


class Loop:
  """Turns that move the same bytes all ways."""

  def __init__(self, blocks: Blocks, folder: Path):
    """Makes what stands beside, warm."""
    self._blocks = blocks
    self._folder = folder
    size = blocks.layout.block_bytes
    self._bare = Bare(size, blocks.num_blocks, blocks.num_blocks)
    while not self._bare.is_full:
      self._bare.put(1)
    self._memcpy = Memcpy(size, max(blocks.num_blocks // 4, 2))
    self._block = np.ones(size // 4, np.float32)
    self._next = 0

  def times(
    self, batch: int, depth: int, turns: int
  ) -> dict[tuple[str, str], float]:
    """Seconds of the median turn by (what, way)."""
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns + 2):
      for key, seconds in self._turn(turn, batch, depth).items():
        times.setdefault(key, []).append(seconds)
    return {key: median(taken[2:]) for key, taken in times.items()}

  def _turn(
    self, turn: int, batch: int, depth: int
  ) -> dict[tuple[str, str], float]:
    count, bare = batch * depth, self._bare
    first, self._next = self._next, self._next + 2 * count
    ids = range(first, first + count)
    pages = [self._blocks.pages(i) for i in ids]
    host = [Replica(NAME, i) for i in ids]
    back = [Replica(NAME, i + count) for i in ids]
    ssd = [Replica(f'{NAME}/ssd', i, i.to_bytes(32, 'big')) for i in ids]
    memcpy_s = self._memcpy.copy(count)
    found = {
      ('offload', 'engine'): self._move(pages, host, batch),
      ('offload', 'device_put'): bare.put(count),
      ('onload', 'engine'): self._move(host, pages, batch),
      ('onload', 'device_put'): bare.get(turn, count),
      ('ssd_write', 'engine'): self._move(host, ssd, batch),
      ('ssd_read', 'engine'): self._move(ssd, back, batch),
    }
    found |= {(what, 'memcpy'): memcpy_s for what in ('offload', 'onload')}
    self._blocks.backend.drop((*host, *back, *ssd))
    return found | self._files(count)

  def _move(self, src: list, dst: list, batch: int) -> float:
    """Seconds to move all, `batch` blocks a transfer, all under way at once."""
    engine = self._blocks.backend.transfers
    ops = [
      [
        op
        for s, d in zip(src[i : i + batch], dst[i : i + batch])
        for op in self._blocks.ops(s, d)
      ]
      for i in range(0, len(src), batch)
    ]
    start_s = time.perf_counter()
    batches = [engine.allocate_batch(len(some)) for some in ops]
    for made, some in zip(batches, ops):
      engine.submit(made, some)
    ended = [s for made in batches for s in engine.wait(made, math.inf)]
    seconds = time.perf_counter() - start_s
    for made in batches:
      engine.free_batch(made)
    if bad := [s for s in ended if s.state != 'COMPLETED']:
      raise RuntimeError(f'a measured transfer failed: {bad[0].error}')
    return seconds

  def _files(self, count: int) -> dict[tuple[str, str], float]:
    paths = [self._folder / f'plain{i}' for i in range(count)]
    found = {
      ('ssd_write', 'plain file'): _sum(write_file, paths, self._block),
      ('ssd_read', 'plain file, warm'): _sum(read_file, paths, self._block),
      ('ssd_read', 'plain file, new'): _sum(read_file, paths, None),
    }
    for path in paths:
      path.unlink()
    return found


def _sum(
  work: Callable[[Path, Any], float], paths: list[Path], block: Any
) -> float:
  return sum(work(path, block) for path in paths)


def _submit(blocks: Blocks, num_ops: int) -> Row:
  """How long the caller of `transfer` is held up while bytes move."""
  returned = []
  for turn in range(30):
    ops = [
      op
      for i in range(-(-num_ops // 3))
      for op in blocks.ops(blocks.pages(i), Replica(NAME, 1000 * turn + i))
    ][:num_ops]
    returned.append(blocks.move(ops)[1])
    blocks.backend.drop(tuple({op.dst for op in ops}))  # type: ignore
  return Row(
    f'transfer.submit_{num_ops}_ops.s',
    median(returned),
    's',
    'median of 30',
    target=SUBMIT_S,
    at_most=True,
  )
