# SPDX-License-Identifier: Apache-2.0
"""The model that benchmarks run: SmolLM2-135M's shape, random weights.

Times depend on shapes alone, so no checkpoint is needed.
"""

from collections.abc import Sequence

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model import fuse
from mooncake_jax.model import kernels
from mooncake_jax.model import pages
from mooncake_jax.model import params
from mooncake_jax.model import sharding
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.huge_pages import on_huge_pages
from mooncake_jax.model.kernels import AttentionChoice
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

CONFIG = ModelConfig(
  family='llama',
  vocab_size=49152,
  model_dim=576,
  mlp_dim=1536,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  max_tokens=8192,
  rope_theta=100000.0,
  norm_eps=1e-5,
  tie_embeddings=True,
)
PAGE_TOKENS = 64


class Model:
  """Weights and a KV pool on one device, with the two steps over them."""

  def __init__(
    self,
    max_tokens: int,
    max_batch: int,
    config: ModelConfig = CONFIG,
    dtype: jax.typing.DTypeLike = 'float32',
    kernel: AttentionChoice = 'auto',
    unroll: bool = True,
    num_pages: int | None = None,
  ):
    """Makes weights and a pool of `dtype` for so many rows and tokens.

    With fewer `num_pages` than that, long contexts go with few rows: a row's
    pages follow the row's before it, as far as the step needs them.
    """
    self.config = config
    pages_shape = (PAGE_TOKENS, config.num_kv_heads, config.head_dim)
    self.kernel = kernels.chosen(
      kernel, jax.devices()[0], pages_shape, jnp.dtype(dtype)
    )
    self.mesh = sharding.make_mesh(jax.devices()[:1], config)
    made = params.init_params(config, jax.random.key(0), dtype, self.mesh)
    made = made if unroll else params.stack_layers(made)
    fused = fuse.fuse(params.materialize_unembed(made))
    self.params = on_huge_pages(fused)
    self._pages = -(-max_tokens // PAGE_TOKENS)
    count = num_pages or 1 + max_batch * self._pages
    pool = pages.init_pool(config, count, PAGE_TOKENS, dtype, self.mesh)
    self._kv = on_huge_pages(pool)

  def _table(self, row: int, each: int) -> np.ndarray:
    """Rows of `each` pages lie behind each other."""
    table_P = np.zeros(self._pages, np.int32)
    table_P[:each] = 1 + row * each + np.arange(each)
    return table_P

  def prefill(self, chunk_tokens: int, prefix_tokens: int) -> jax.Array:
    """One chunk on a prefix; returns its logits [V]."""
    host = (
      np.arange(chunk_tokens, dtype=np.int32) % self.config.vocab_size,
      self._table(0, self._pages),
      np.int32(prefix_tokens),
      np.int32(chunk_tokens),
      SamplingRows.of([Sampling()]),
    )
    _, logits_V, self._kv = prefill_chunk(
      self.params,
      self.config,
      self._kv,
      *sharding.place(host, self.mesh),
      kernel=self.kernel,
    )
    assert logits_V is not None
    return logits_V

  def batch(self, positions: Sequence[int]) -> DecodeState:
    """A batch whose rows stand at these positions; room for a page more."""
    count = len(positions)
    each = -(-(max(positions) + PAGE_TOKENS) // PAGE_TOKENS)
    state = DecodeState(
      tokens_B=np.ones(count, np.int32),
      positions_B=np.array(positions, np.int32),
      active_B=np.ones(count, bool),
      page_table_BP=np.stack([self._table(i, each) for i in range(count)]),
      sampling=SamplingRows.of([Sampling()] * count),
    )
    return sharding.place(state, self.mesh)

  def decode(self, state: DecodeState) -> DecodeState:
    """One step; the state after it."""
    state, _, self._kv = decode_step(
      self.params, self.config, self._kv, state, self.kernel
    )
    return state

  @property
  def step_bytes(self) -> int:
    """Weights that each step must read: all but the embedding's rows."""
    leaves = jax.tree.leaves({**self.params, 'embed': jnp.zeros(0)})
    return sum(leaf.nbytes for leaf in leaves)
