# SPDX-License-Identifier: Apache-2.0
"""Prefill of one chunk of one prompt, all layers on one mesh.

T chunk token, D model, V vocab, P page.
"""

import functools

import jax

from mooncake_jax.model import forward
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import sample
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig


@functools.partial(jax.jit, static_argnames='config', donate_argnames='kv')
def prefill_chunk(
  params: Params,
  config: ModelConfig,
  kv: jax.Array,
  tokens_T: jax.Array,
  page_table_P: jax.Array,
  start: jax.Array,
  length: jax.Array,
  sampling: SamplingRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes prompt tokens [start, start + length), in place in `kv`.

  Compiles once a chunk bucket T and page table size P; `start`, `length` and
  the pages are traced. The KVCache of [0, start) already lies in the pages.

  Args:
    kv: the pool, donated.
    tokens_T: int32, padded to the bucket; `length` of them are valid.
    page_table_P: int32, pages in token order, covering start + length tokens.
    start, length: int32 scalars.
    sampling: of one row (B = 1).

  Returns:
    The int32 token drawn after the last valid one, its logits float32 [V],
    and the pool.
  """
  stop = start + length
  x_1TD = forward.embed(params, tokens_T[None])
  x_1TD, kv = forward.stage_fn(
    params['layers'],
    config,
    x_1TD,
    kv,
    page_table_P[None],
    start[None],
    stop[None],
  )
  last_1D = jax.lax.dynamic_index_in_dim(x_1TD[0], length - 1)
  logits_1V = forward.unembed(params, config, last_1D)
  token_1 = sample(logits_1V, sampling, stop[None])
  return token_1[0], logits_1V[0], kv
