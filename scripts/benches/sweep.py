# SPDX-License-Identifier: Apache-2.0
"""Block sizes, blocks a transfer and transfers under way: what is swept."""

from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_jax.model_config import ModelConfig
from scripts.benches.rows import Point
from scripts.benches.rows import Row
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import blocks_of

MIB = 1 << 20
SIZES = {f'{n}KiB': n << 10 for n in (64, 256)} | {
  f'{n}MiB': n << 20 for n in (1, 4, 16, 64)
}
QUICK_SIZES = ('64KiB', '1MiB', '64MiB')
# (blocks a transfer, transfers under way)
MODES = ((1, 1), (1, 4), (1, 16), (16, 1))
QUICK_MODES = ((1, 1), (1, 16), (16, 1))
MOVED_BYTES = 128 * MIB  # most that one turn moves
POOL_BYTES = 256 * MIB
SSD_BYTES = 512 * MIB

# A small model whose KVCache is 8 KiB a token, so that blocks can be small.
SMALL = ModelConfig(
  family='llama',
  vocab_size=64,
  model_dim=64,
  mlp_dim=64,
  num_layers=4,
  num_heads=4,
  num_kv_heads=4,
  head_dim=64,
  max_tokens=8192,
)
TOKEN_BYTES = 8192


def sizes(quick: bool) -> dict[str, int]:
  """Bytes of a block, by name."""
  return {n: s for n, s in SIZES.items() if not quick or n in QUICK_SIZES}


def modes(quick: bool, size: int) -> list[tuple[int, int]]:
  """(blocks a transfer, transfers under way) that a turn can move."""
  most = MOVED_BYTES // size
  wanted = QUICK_MODES if quick else MODES
  return sorted(
    {(min(batch, most), min(depth, most)) for batch, depth in wanted}
  )


def panel(size: int, mode: tuple[int, int]) -> str:
  """The mode that was wanted where a turn of so large blocks is less."""
  most = MOVED_BYTES // size
  clipped = {(min(b, most), min(d, most)): (b, d) for b, d in MODES}
  batch, depth = mode if mode in MODES else clipped[mode]
  return f'{batch}x{depth}'


@contextmanager
def small_blocks(size: int, **kwargs) -> Iterator[Blocks]:
  """A backend with blocks of `size` bytes, each one part."""
  tokens = size // TOKEN_BYTES
  with blocks_of(
    tokens, SMALL.num_layers, SMALL, POOL_BYTES, **kwargs
  ) as blocks:
    assert blocks.layout.block_bytes == size
    blocks.fill()
    yield blocks


def rows_of(
  bench: str,
  size_name: str,
  size: int,
  mode: tuple[int, int],
  times: dict[tuple[str, str], float],
) -> list[Row]:
  """A row for each ('put', way): bytes a second."""
  batch, depth = mode
  return [
    Row(
      f'{bench}.{what}.{size_name}.{batch}x{depth}.{way}.bytes_per_s',
      batch * depth * size / seconds,
      'B/s',
      f'{batch} blocks a transfer, {depth} under way',
      point=Point(f'{bench} {what} {panel(size, mode)}', way, size),
    )
    for (what, way), seconds in sorted(times.items())
  ]
