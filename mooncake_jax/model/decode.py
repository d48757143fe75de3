# SPDX-License-Identifier: Apache-2.0
"""One decode step of a batch: every active row emits a token.

B batch row, D model, V vocab, P page.
"""

from dataclasses import replace
import functools

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model import forward
from mooncake_jax.model import logprobs
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import sample
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig


@flax.struct.dataclass
class DecodeState:
  """A batch between two steps.

  Attributes:
    tokens_B: int32, the last token of each row; its KVCache is missing yet.
    positions_B: int32, where that token stands.
    active_B: bool; the others are padding and do not move.
    page_table_BP: int32, pages in token order.
    sampling: how each row draws.
  """

  tokens_B: jax.Array | np.ndarray
  positions_B: jax.Array | np.ndarray
  active_B: jax.Array | np.ndarray
  page_table_BP: jax.Array | np.ndarray
  sampling: SamplingRows


def decode_logits(
  params: Params,
  config: ModelConfig,
  kv: jax.Array,
  state: DecodeState,
  kernel: AttentionKernel = 'jnp',
) -> tuple[jax.Array, jax.Array]:
  """Computes the rows' tokens: float32 logits [B, V], and the pool."""
  tokens_B, table_BP = map(jnp.asarray, (state.tokens_B, state.page_table_BP))
  start_B = jnp.where(state.active_B, state.positions_B, 0)
  stop_B = jnp.where(state.active_B, state.positions_B + 1, 0)
  x_B1D = forward.embed(params, tokens_B[:, None])
  x_B1D, kv = forward.stage_fn(
    params['layers'],
    config,
    x_B1D,
    kv,
    table_BP,
    start_B,
    stop_B,
    kernel=kernel,
  )
  return forward.unembed(params, config, x_B1D[:, 0], kernel), kv


@functools.partial(
  jax.jit, static_argnames=('config', 'kernel'), donate_argnames='kv'
)
def decode_step(
  params: Params,
  config: ModelConfig,
  kv: jax.Array,
  state: DecodeState,
  kernel: AttentionKernel = 'jnp',
) -> tuple[DecodeState, jax.Array, jax.Array]:
  """Steps all active rows by one token, in place in `kv` (donated).

  Compiles once a batch size B and page table size P. The new state's tokens
  are those just drawn; rows may join and leave between steps.

  Returns:
    The new state, the report on its tokens (`logprobs.report`), the pool.
  """
  logits_BV, kv = decode_logits(params, config, kv, state, kernel)
  next_B = jnp.asarray(state.positions_B) + 1
  drawn_B = sample(logits_BV, state.sampling, next_B)
  tokens_B = jnp.where(state.active_B, drawn_B, state.tokens_B)
  is_asked_B = jnp.logical_and(state.active_B, state.sampling.logprobs_B)
  report_BR = logprobs.report(logits_BV, tokens_B, is_asked_B)
  positions_B = jnp.where(state.active_B, next_B, state.positions_B)
  state = replace(state, tokens_B=tokens_B, positions_B=positions_B)
  return state, report_BR, kv
