# SPDX-License-Identifier: Apache-2.0
"""A stage's KV pool on its mesh, and the copies into and out of it.

All methods but `take` run on the stage's owner thread, inside its mesh: the
pool is donated to every program that writes it. They dispatch and return;
nobody waits here. Host arrays are made anew each time, for a CPU device uses
them in place.

T chunk token, P page of a page table, n pages.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.spec import bucket
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model import pages as kv_pool
from mooncake_jax.model.huge_pages import on_huge_pages
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling
from mooncake_jax.transfer import cpu_copies
from mooncake_jax.transfer.heads import DevicePlace
from mooncake_jax.transfer.heads import HeadSlices

T = TypeVar('T')


class ChunkInputs(NamedTuple):
  """What the programs of a chunk take beside activations."""

  tokens_T: Any
  page_table_P: Any
  start: Any
  length: Any
  sampling: SamplingRows


class StagePool:
  """Pages of a layer range.

  Attributes:
    kv: the pool; who donates it puts back what came of it.
    layers: [start, stop) that it has.
    can_copy_now: whether it is a CPU's memory.
    copies_now: whether it makes use of that.
  """

  def __init__(
    self,
    config: ModelConfig,
    spec: InstanceSpec,
    mesh: Mesh,
    layers: Layers,
    layout: KVLayout,
    kv_dtype: jax.typing.DTypeLike,
    num_layers: int | None = None,
  ):
    """Allocates the pool, with room for `num_layers` if that is more."""
    self.spec = spec
    self.mesh = mesh
    self.layers = layers
    self.page_tokens = layout.page_tokens
    self.table_pages = layout.pages_for(spec.max_tokens)
    self._whole = NamedSharding(mesh, PartitionSpec())
    kv = kv_pool.init_pool(
      config,
      spec.num_pages,
      layout.page_tokens,
      kv_dtype,
      mesh,
      num_layers or layers[1] - layers[0],
    )
    self.kv = on_huge_pages(kv)
    self.can_copy_now = cpu_copies.is_taken(self.kv.devices())
    self.copies_now = self.can_copy_now

  def check(self) -> None:
    """Raises RuntimeError if a program failed after it was given the pool."""
    if self.kv.is_deleted():
      raise RuntimeError(f'{self.spec.name} lost its KV pool')

  @property
  def pointers(self) -> tuple[int, ...]:
    """Where each device's part of the pool lies in its memory."""
    return tuple(
      shard.data.unsafe_buffer_pointer() for shard in self.kv.addressable_shards
    )

  def chunk_inputs(self, chunk: PrefillChunk) -> ChunkInputs:
    """What the programs of a chunk take, on the host; raises ValueError."""
    name = f'{chunk.request_id!r} [{chunk.start}, {chunk.stop})'
    length = chunk.stop - chunk.start
    if chunk.tokens is None or len(chunk.tokens) != length or length < 1:
      raise ValueError(f'prefill of {name} needs {length} tokens')
    size = bucket(length, self.spec.chunk_buckets, 'chunk_tokens')
    tokens_T = np.zeros(size, np.int32)
    tokens_T[:length] = chunk.tokens
    return ChunkInputs(
      tokens_T,
      self.page_table(chunk.pages, chunk.stop, name),
      np.int32(chunk.start),
      np.int32(length),
      SamplingRows.of([chunk.sampling or Sampling()]),
    )

  def take(self, x: jax.Array) -> jax.Array:
    """Brings what another stage computed onto the mesh. Any thread."""
    return jax.device_put(x, self._whole)

  def written_pages(self, chunk: PrefillChunk) -> set[int]:
    """The pages that a chunk writes."""
    last = -(-chunk.stop // self.page_tokens)
    return set(chunk.pages[chunk.start // self.page_tokens : last])

  def copy_out(
    self, pages: tuple[int, ...], start_layer: int, stop_layer: int
  ) -> jax.Array:
    """Returns pages of a layer range as a block [L, 2, S, K, H]."""
    pages_n, start = self._pages(pages), np.int32(start_layer - self.layers[0])
    num_layers = stop_layer - start_layer
    return kv_pool.gather_pages(self.kv, pages_n, start, num_layers)

  def copy_out_now(
    self,
    pages: tuple[int, ...],
    start_layer: int,
    stop_layer: int,
    num_blocks: int,
  ) -> list[HeadSlices] | None:
    """The same as blocks that are there at once; None where that can't be."""
    if not self._is_at_rest:
      return None
    pages_bn = self._pages(pages).reshape(num_blocks, -1)
    first, last = start_layer - self.layers[0], stop_layer - self.layers[0]
    return cpu_copies.copy_out(self.kv, pages_bn, first, last)

  def copy_in_now(
    self,
    blocks: Sequence[tuple[tuple[int, ...], int, Mapping[Any, np.ndarray]]],
  ) -> bool:
    """Writes blocks at once, each into pages, from a layer on, by device.

    Nobody reads the pages. False, and nothing done, where that can't be.
    """
    if not self._is_at_rest:
      return False
    first = self.layers[0]
    own = [(self._pages(pages), start - first, b) for pages, start, b in blocks]
    cpu_copies.copy_in(self.kv, own)
    return True

  @property
  def _is_at_rest(self) -> bool:
    """Whether the pool is a CPU's memory that no program writes."""
    kv = self.kv
    return self.copies_now and kv.is_ready()  # pyright: ignore

  def copy_in(
    self, pages: tuple[int, ...], start_layer: int, block_L2SKH: jax.Array
  ) -> jax.Array:
    """Writes a block into pages; what it returns is ready when it is done."""
    pages_n, start = self._pages(pages), np.int32(start_layer - self.layers[0])
    self.kv, done = kv_pool.scatter_pages(self.kv, pages_n, block_L2SKH, start)
    return done

  def in_turn(
    self,
    run: Callable[[], T],
    what: str,
    numbers: Sequence[int] = (),
    arrays: Sequence[np.ndarray] = (),
  ) -> T:
    """Starts programs on the pool; see `spanning.py` for who is told what."""
    return run()

  def block_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
    """How a block [L, 2, S, K, H] lies on the mesh."""
    return DevicePlace(self.mesh).block_sharding(shape)

  def put(self, tree: Any) -> Any:
    """Copies host arrays to each of the mesh's devices."""
    return jax.device_put(tree, self._whole)

  def _pages(self, pages: tuple[int, ...]) -> np.ndarray:
    if min(pages) < 0 or max(pages) >= self.spec.num_pages:
      raise ValueError(f'{pages=} are not in [0, {self.spec.num_pages})')
    return np.array(pages, np.int32)

  def page_table(
    self, pages: tuple[int, ...], num_tokens: int, name: str
  ) -> np.ndarray:
    """Pages of a request [P], behind them scratch; raises ValueError."""
    if num_tokens > self.spec.max_tokens:
      raise ValueError(
        f'{name}: {num_tokens=} exceed max_tokens={self.spec.max_tokens}'
      )
    if len(pages) * self.page_tokens < num_tokens:
      raise ValueError(
        f'{name}: {len(pages)} pages of {self.page_tokens} tokens do not '
        f'cover {num_tokens=}'
      )
    page_table_P = np.zeros(self.table_pages, np.int32)
    used = self._pages(pages[: self.table_pages])
    page_table_P[: len(used)] = used
    return page_table_P
