# SPDX-License-Identifier: Apache-2.0
"""Prefill of one chunk of one prompt: all layers on one mesh, or some.

T chunk token, D model, V vocab, P page, R numbers of a report.
"""

import functools

import jax
from jax import numpy as jnp

from mooncake_jax.model import forward
from mooncake_jax.model import logprobs
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import sample
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig


@functools.partial(
  jax.jit, static_argnames=('config', 'kernel'), donate_argnames='kv'
)
def prefill_chunk(
  params: Params,
  config: ModelConfig,
  kv: jax.Array,
  x: jax.Array,
  page_table_P: jax.Array,
  start: jax.Array,
  length: jax.Array,
  sampling: SamplingRows,
  first_layer: jax.Array | int = 0,
  kernel: AttentionKernel = 'jnp',
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
  """Computes prompt tokens [start, start + length), in place in `kv`.

  Compiles once a chunk bucket T and page table size P; `start`, `length`,
  the pages and `first_layer` are traced. The KVCache of [0, start) already
  lies in the pages.

  Args:
    params: of the model, or of consecutive layers of it (`layers_params`).
    kv: the pool of the layers' stage, donated.
    x: int32 tokens [T] for the first layer on, padded to the bucket, `length`
      of them valid; for others what the layers before gave, [1, T, D].
    page_table_P: int32, pages in token order, covering start + length tokens.
    start, length: int32 scalars.
    sampling: of one row (B = 1).
    first_layer: where the layers' KVCache lies in the pool.
    kernel: of attention.

  Returns:
    After the last layer: the report (`logprobs.report`) int32 [R] on the token
    drawn after the last valid one, its logits float32 [V], and the pool. After
    others: x [1, T, D], None, and the pool.
  """
  stop = start + length
  x_1TD = forward.embed(params, x[None]) if x.ndim == 1 else x
  x_1TD, kv = forward.stage_fn(
    params['layers'],
    config,
    x_1TD,
    kv,
    page_table_P[None],
    start[None],
    stop[None],
    first_layer,
    kernel=kernel,
  )
  if 'final_norm' not in params:
    return x_1TD, None, kv
  return *draw(params, config, x_1TD, stop, length, sampling), kv


def draw(
  params: Params,
  config: ModelConfig,
  x_1TD: jax.Array,
  stop: jax.Array,
  length: jax.Array,
  sampling: SamplingRows,
) -> tuple[jax.Array, jax.Array]:
  """Draws the token at `stop`, after a chunk's last valid one.

  Returns:
    The report int32 [R] on the token and its logits float32 [V].
  """
  last_1D = jax.lax.dynamic_index_in_dim(x_1TD[0], length - 1)
  logits_1V = forward.unembed(params, config, last_1D)
  token_1 = sample(logits_1V, sampling, stop[None])
  report_1R = logprobs.report(
    logits_1V, token_1, jnp.asarray(sampling.logprobs_B)
  )
  return report_1R[0], logits_1V[0]
