# SPDX-License-Identifier: Apache-2.0
"""A stage's parameters and KV pool on its mesh, and the programs on them.

All methods but the constructor run on the stage's owner thread, inside its
mesh: the pool is donated to every program that writes it. They dispatch and
return; nobody waits here. Host arrays are made anew each time, for a CPU
device uses them in place.

T chunk token, B batch row, P page of a page table, n pages.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.spec import bucket
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model import decode
from mooncake_jax.model import pages as kv_pool
from mooncake_jax.model.params import join_params
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling
from mooncake_jax.transfer import cpu_copies
from mooncake_jax.transfer.heads import HeadSlices


class ChunkInputs(NamedTuple):
  """What the programs of a chunk take beside activations."""

  tokens_T: Any
  page_table_P: Any
  start: Any
  length: Any
  sampling: SamplingRows


class MeshModel:
  """Dispatches prefill chunks, decode steps and page copies on one pool.

  Attributes:
    groups: layer ranges that are computed one by one.
    can_copy_now: whether the pool is a CPU's memory.
    copies_now: whether it makes use of that.
  """

  def __init__(
    self,
    config: ModelConfig,
    spec: InstanceSpec,
    mesh: Mesh,
    params: Sequence[Params],
    groups: Sequence[tuple[int, int]],
    layout: KVLayout,
    kv_dtype: jax.typing.DTypeLike,
    prefill_program: Callable[..., Any],
  ):
    """Allocates the pool.

    Args:
      params: a tree for each layer group; they lie on the mesh already.
      groups: consecutive layer ranges, which a chunk goes through one by one.
      prefill_program: computes a group as `prefill_chunk` does.
    """
    self._prefill = prefill_program
    self.config = config
    self.spec = spec
    self.mesh = mesh
    self.groups = tuple(groups)
    self.page_tokens = layout.page_tokens
    self._group_params = params
    self._params = join_params(params)
    self._table_pages = layout.pages_for(spec.max_tokens)
    self._whole = NamedSharding(mesh, PartitionSpec())
    self._first = first = groups[0][0]
    self._first_layers = [self._put(np.int32(a - first)) for a, _ in groups]
    self._kv = kv_pool.init_pool(
      config,
      spec.num_pages,
      layout.page_tokens,
      kv_dtype,
      mesh,
      groups[-1][1] - first,
    )
    self.copies_now = self.can_copy_now = cpu_copies.on_cpu(self._kv)

  def check_pool(self) -> None:
    """Raises RuntimeError if a program failed after it was given the pool."""
    if self._kv.is_deleted():
      raise RuntimeError(f'{self.spec.name} lost its KV pool')

  @property
  def pool_pointers(self) -> tuple[int, ...]:
    """Where each device's part of the pool lies in its memory."""
    return tuple(
      shard.data.unsafe_buffer_pointer()
      for shard in self._kv.addressable_shards
    )

  def chunk_inputs(self, chunk: PrefillChunk) -> ChunkInputs:
    """Puts on the devices what all layer groups of a chunk take."""
    name = f'{chunk.request_id!r} [{chunk.start}, {chunk.stop})'
    length = chunk.stop - chunk.start
    if chunk.tokens is None or len(chunk.tokens) != length or length < 1:
      raise ValueError(f'prefill of {name} needs {length} tokens')
    size = bucket(length, self.spec.chunk_buckets, 'chunk_tokens')
    tokens_T = np.zeros(size, np.int32)
    tokens_T[:length] = chunk.tokens
    inputs = ChunkInputs(
      tokens_T,
      self._page_table(chunk.pages, chunk.stop, name),
      np.int32(chunk.start),
      np.int32(length),
      SamplingRows.of([chunk.sampling or Sampling()]),
    )
    return self._put(inputs)

  def prefill(
    self, inputs: ChunkInputs, group: int, x: jax.Array | None = None
  ) -> jax.Array:
    """Computes a chunk in one of the layer groups.

    Args:
      x: what the group before gave; None takes the tokens.

    Returns:
      What the next group takes; after the last layer, the token drawn.
    """
    out, _, self._kv = self._prefill(
      self._group_params[group],
      self.config,
      self._kv,
      inputs.tokens_T if x is None else x,
      *inputs[1:],
      self._first_layers[group],
    )
    return out

  def take(self, x: jax.Array) -> jax.Array:
    """Brings what another stage computed onto the mesh. Any thread."""
    return jax.device_put(x, self._whole)

  def written_pages(self, chunk: PrefillChunk) -> set[int]:
    """The pages that a chunk writes."""
    last = -(-chunk.stop // self.page_tokens)
    return set(chunk.pages[chunk.start // self.page_tokens : last])

  def batch(self, rows: Sequence[DecodeRow]) -> decode.DecodeState:
    """Puts a batch on the devices, padded with inactive rows."""
    B = bucket(len(rows), self.spec.batch_sizes, 'rows')
    tokens_B = np.zeros(B, np.int32)
    positions_B = np.zeros(B, np.int32)
    page_table_BP = np.zeros((B, self._table_pages), np.int32)
    for i, row in enumerate(rows):
      if row.token is None or row.remaining < 1:
        raise ValueError(
          f'row {row.request_id!r}: {row.token=} '
          f'{row.remaining=}, needs a token and a place'
        )
      tokens_B[i] = row.token
      positions_B[i] = row.position
      stop = row.position + row.remaining
      page_table_BP[i] = self._page_table(row.pages, stop, row.request_id)
    padding = [Sampling()] * (B - len(rows))
    sampling = SamplingRows.of([*(row.sampling for row in rows), *padding])
    active_B = np.arange(B) < len(rows)
    return self._put(
      decode.DecodeState(
        tokens_B, positions_B, active_B, page_table_BP, sampling
      )
    )

  def step(
    self, state: decode.DecodeState
  ) -> tuple[decode.DecodeState, jax.Array]:
    """Steps a batch by one token; returns the new tokens [B] too."""
    state, self._kv = decode.decode_step(
      self._params, self.config, self._kv, state
    )
    tokens_B = state.tokens_B
    assert isinstance(tokens_B, jax.Array)
    tokens_B.copy_to_host_async()
    return state, tokens_B

  def copy_out(
    self, pages: tuple[int, ...], start_layer: int, stop_layer: int
  ) -> jax.Array:
    """Returns pages of a layer range as a block [L, 2, S, K, H]."""
    pages_n, start = self._pages(pages), np.int32(start_layer - self._first)
    num_layers = stop_layer - start_layer
    return kv_pool.gather_pages(self._kv, pages_n, start, num_layers)

  def copy_out_now(
    self, pages: tuple[int, ...], start_layer: int, stop_layer: int
  ) -> HeadSlices | None:
    """The same as slices that are there at once; None where that can't be."""
    if not self._is_at_rest:
      return None
    pages_n = self._pages(pages)
    first, last = start_layer - self._first, stop_layer - self._first
    return cpu_copies.copy_out(self._kv, pages_n, first, last)

  def copy_in_now(
    self,
    pages: tuple[int, ...],
    start_layer: int,
    blocks: Mapping[Any, np.ndarray],
  ) -> bool:
    """Writes a block, given by device, at once; False where that can't be.

    Nobody reads the pages.
    """
    if not self._is_at_rest:
      return False
    first = start_layer - self._first
    cpu_copies.copy_in(self._kv, self._pages(pages), first, blocks)
    return True

  @property
  def _is_at_rest(self) -> bool:
    """Whether the pool is a CPU's memory that no program writes."""
    kv = self._kv
    return self.copies_now and kv.is_ready()  # pyright: ignore

  def copy_in(
    self, pages: tuple[int, ...], start_layer: int, block_L2SKH: jax.Array
  ) -> jax.Array:
    """Writes a block into pages; what it returns is ready when it is done."""
    pages_n, start = self._pages(pages), np.int32(start_layer - self._first)
    self._kv, done = kv_pool.scatter_pages(
      self._kv, pages_n, block_L2SKH, start
    )
    return done

  def _put(self, tree):
    return jax.device_put(tree, self._whole)

  def _pages(self, pages: tuple[int, ...]) -> np.ndarray:
    pages_n = np.array(pages, np.int32)
    if pages_n.min() < 0 or pages_n.max() >= self.spec.num_pages:
      raise ValueError(f'{pages=} are not in [0, {self.spec.num_pages})')
    return pages_n

  def _page_table(
    self, pages: tuple[int, ...], num_tokens: int, name: str
  ) -> np.ndarray:
    if num_tokens > self.spec.max_tokens:
      raise ValueError(
        f'{name}: {num_tokens=} exceed max_tokens={self.spec.max_tokens}'
      )
    if len(pages) * self.page_tokens < num_tokens:
      raise ValueError(
        f'{name}: {len(pages)} pages of {self.page_tokens} tokens do not '
        f'cover {num_tokens=}'
      )
    page_table_P = np.zeros(self._table_pages, np.int32)
    used = self._pages(pages[: self._table_pages])
    page_table_P[: len(used)] = used
    return page_table_P
