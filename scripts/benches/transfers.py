# SPDX-License-Identifier: Apache-2.0
"""A backend whose blocks the benchmarks of transfers move, and how."""

from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import time

import jax

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model import params
from scripts.benches.model import CONFIG

PAGE_TOKENS = 64
POOL_BYTES = 512 << 20
NAME = 'a'
TOKEN_BYTES = CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4


@dataclass(frozen=True)
class Blocks:
  """A backend of one instance, all of whose pages are cut into blocks."""

  backend: DeviceBackend
  layout: KVLayout
  num_blocks: int

  def pages(self, block: int) -> DevicePages:
    """Where block `block` (any number) lies on the device."""
    n = self.layout.pages_per_block
    first = 1 + block % self.num_blocks * n
    return DevicePages(NAME, tuple(range(first, first + n)))

  def ops(
    self, src: DevicePages | Replica, dst: DevicePages | Replica
  ) -> Iterator[TransferOp]:
    """Moves one block, part by part."""
    n = self.layout.pages_per_block
    for layers in self.layout.layer_ranges:
      num_bytes = self.layout.part_bytes(n, layers)
      yield TransferOp(src, dst, *layers, num_bytes)

  def move(self, ops: Iterable[TransferOp]) -> tuple[float, float]:
    """Seconds until all have completed, and until `transfer` returned."""
    listed = tuple(ops)
    start_s = time.perf_counter()
    self.backend.transfer(listed, 0, float('inf'))
    returned_s = time.perf_counter() - start_s
    while not (ended := self.backend.wait(None)):
      pass
    seconds = time.perf_counter() - start_s
    if ended[0].status != 'completed':
      raise RuntimeError(f'a measured transfer failed: {ended[0].error}')
    return seconds, returned_s


@contextmanager
def blocks_of(
  block_tokens: int, num_parts: int = 1, **kwargs
) -> Iterator[Blocks]:
  """A backend with blocks of so many tokens, `num_parts` parts each."""
  layers = CONFIG.num_layers
  layout = KVLayout(
    layers,
    TOKEN_BYTES // layers,
    PAGE_TOKENS,
    block_tokens,
    -(-layers // num_parts),
  )
  num_blocks = max(POOL_BYTES // layout.block_bytes, 2)
  num_pages = 1 + num_blocks * layout.pages_per_block
  spec = InstanceSpec(NAME, 'prefill', num_pages, 2048, **kwargs)
  made = params.init_params(CONFIG, jax.random.key(0))
  with DeviceBackend(CONFIG, layout, [spec], made) as backend:
    yield Blocks(backend, layout, num_blocks)
