# SPDX-License-Identifier: Apache-2.0
"""How tokens, pages, blocks and layers of the KVCache divide each other.

A block is a whole number of pages. Bytes of a block are canonical,
[L, 2, C, K, H] whatever the instance's mesh, and travel in parts: one a layer
range.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class KVLayout:
  """Sizes of the KVCache as every instance of a cluster counts it.

  Attributes:
    token_layer_bytes: KVCache of one token in one layer, 2 * K * H * itemsize.
    page_tokens: tokens in a device page.
    block_size_tokens: tokens in a block, a multiple of page_tokens.
    layers_per_transfer: layers in one part of a transfer.
  """

  num_layers: int
  token_layer_bytes: int
  page_tokens: int
  block_size_tokens: int
  layers_per_transfer: int

  def __post_init__(self):
    for name in self.__dataclass_fields__:
      if getattr(self, name) < 1:
        raise ValueError(f'KVLayout.{name}={getattr(self, name)} must be >= 1')
    if self.block_size_tokens % self.page_tokens:
      raise ValueError(
        f'block_size_tokens={self.block_size_tokens} must be a multiple of '
        f'page_tokens={self.page_tokens}'
      )

  @property
  def pages_per_block(self) -> int:
    return self.block_size_tokens // self.page_tokens

  @property
  def block_bytes(self) -> int:
    return self.block_size_tokens * self.num_layers * self.token_layer_bytes

  @cached_property
  def layer_ranges(self) -> tuple[tuple[int, int], ...]:
    """[start, stop) of each part: 5 layers by 2 are (0,2) (2,4) (4,5)."""
    step = self.layers_per_transfer
    return tuple(
      (start, min(start + step, self.num_layers))
      for start in range(0, self.num_layers, step)
    )

  @cached_property
  def block_parts(self) -> list[tuple[tuple[int, int], int]]:
    """Layer ranges, with the bytes that one block has in each."""
    n = self.pages_per_block
    return [(r, self.part_bytes(n, r)) for r in self.layer_ranges]

  def pages_for(self, num_tokens: int) -> int:
    return -(-num_tokens // self.page_tokens)

  def block_pages(self, pages: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The pages of one block out of a request's page table."""
    n = self.pages_per_block
    return pages[block * n : (block + 1) * n]

  def part_bytes(self, num_pages: int, layers: tuple[int, int]) -> int:
    num_layers = layers[1] - layers[0]
    return num_pages * self.page_tokens * num_layers * self.token_layer_bytes

  def reusable_blocks(self, num_tokens: int) -> int:
    """Complete blocks before the last token, which is always computed.

    With blocks of 4: 3 tokens -> 0, 4 -> 0, 5 -> 1, 8 -> 1, 9 -> 2.
    """
    return (num_tokens - 1) // self.block_size_tokens
