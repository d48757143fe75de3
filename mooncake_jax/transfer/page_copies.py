# SPDX-License-Identifier: Apache-2.0
"""How many pages are copied at once: few sizes, so few programs."""

from mooncake_jax.blocks.layout import KVLayout

# Pages are copied so many at once, singly, or a block at a time.
LARGEST_COPY_PAGES = 8


def copy_sizes(layout: KVLayout) -> tuple[int, ...]:
  """Numbers of pages that are copied at once."""
  return tuple(sorted({1, layout.pages_per_block, LARGEST_COPY_PAGES}))


def split_pages(num_pages: int, sizes: tuple[int, ...]) -> list[slice]:
  """Cuts `num_pages` into runs of the given sizes, largest first.

  With sizes (1, 2, 4): 7 -> 4 + 2 + 1. `sizes` must have 1.
  """
  runs, at = [], 0
  for size in sorted(sizes, reverse=True):
    while num_pages - at >= size:
      runs.append(slice(at, at + size))
      at += size
  assert at == num_pages, (num_pages, sizes)
  return runs
