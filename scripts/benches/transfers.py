# SPDX-License-Identifier: Apache-2.0
"""A backend whose blocks the benchmarks of transfers move, and how."""

from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import time

import jax
import numpy as np

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model import params
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.segment import Part
from scripts.benches.model import CONFIG

PAGE_TOKENS = 64
POOL_BYTES = 512 << 20
NAME = 'a'
FILLER = 1 << 40  # replicas that fill the pool are numbered from here


@dataclass(frozen=True)
class Blocks:
  """A backend of one instance, all of whose pages are cut into blocks."""

  config: ModelConfig
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

  def fill(self) -> None:
    """Writes the number of each block all over its pages."""
    layout = self.layout
    segment = self.backend.instances[NAME].segment
    shape = (
      layout.num_layers,
      2,
      layout.block_size_tokens,
      self.config.num_kv_heads,
      self.config.head_dim,
    )
    for block in range(self.num_blocks):
      replica = Replica(NAME, FILLER + block)
      part = Part(0, layout.num_layers, (np.full(shape, block, np.float32),))
      segment.put(replica.replica_id, part)
      self.move(self.ops(replica, self.pages(block)))
      self.backend.drop((replica,))

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
  block_tokens: int,
  layers_per_part: int = CONFIG.num_layers,
  config: ModelConfig = CONFIG,
  pool_bytes: int = POOL_BYTES,
  **kwargs,
) -> Iterator[Blocks]:
  """A backend with blocks of so many tokens, cut into parts by layers.

  Args:
    kwargs: of its `InstanceSpec`.
  """
  layout = KVLayout(
    config.num_layers,
    2 * config.num_kv_heads * config.head_dim * 4,
    min(PAGE_TOKENS, block_tokens),
    block_tokens,
    layers_per_part,
  )
  num_blocks = max(pool_bytes // layout.block_bytes, 2)
  num_pages = 1 + num_blocks * layout.pages_per_block
  spec = InstanceSpec(NAME, 'prefill', num_pages, 2048, **kwargs)
  made = params.init_params(config, jax.random.key(0))
  with DeviceBackend(config, layout, [spec], made) as backend:
    yield Blocks(config, backend, layout, num_blocks)
