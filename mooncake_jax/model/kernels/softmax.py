# SPDX-License-Identifier: Apache-2.0
"""One step of FlashAttention's recurrence, as our kernels share it.

R query row, C key token, H head dim. The queries of one KV head stand in
rows, token after token: row r is query r % G of token r // G.
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp

MASKED = -1e30  # finite: a fully masked block must not give NaN


class Sums(NamedTuple):
  """Of the keys so far: maximum and sum [R], weighted values [R, H]."""

  top_R: jax.Array
  sum_R: jax.Array
  out_RH: jax.Array


def empty(num_rows: int, head_dim: int) -> Sums:
  """Sums of no keys."""
  zero_R = jnp.zeros((num_rows,), jnp.float32)
  return Sums(zero_R + MASKED, zero_R, jnp.zeros((num_rows, head_dim)))


def add(
  sums: Sums,
  q_RH: jax.Array,
  k_CH: jax.Array,
  v_CH: jax.Array,
  visible_RC: jax.Array,
) -> Sums:
  """Adds keys and values; `q_RH` is scaled already."""
  s_RC = _dot(q_RH, k_CH.astype(q_RH.dtype), 1)
  s_RC = jnp.where(visible_RC, s_RC, MASKED)
  top_R = jnp.maximum(sums.top_R, jnp.max(s_RC, axis=1))
  p_RC = jnp.where(visible_RC, jnp.exp(s_RC - top_R[:, None]), 0.0)
  keep_R = jnp.exp(sums.top_R - top_R)
  pv_RH = _dot(p_RC.astype(q_RH.dtype), v_CH.astype(q_RH.dtype), 0)
  return Sums(
    top_R,
    sums.sum_R * keep_R + jnp.sum(p_RC, axis=1),
    sums.out_RH * keep_R[:, None] + pv_RH,
  )


def visible(
  position_R: jax.Array, token_C: jax.Array, window: int | None
) -> jax.Array:
  """[R, C]: a query sees tokens up to its own, so many of them."""
  q_R1, k_1C = position_R[:, None], token_C[None]
  causal = k_1C <= q_R1
  return causal if window is None else causal & (k_1C > q_R1 - window)


def exact(dtype: jax.typing.DTypeLike) -> jax.lax.Precision | None:
  """Of products in attention: float32 is not cut to TF32 or bfloat16."""
  return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _dot(a, b, contracted):
  """a x b over b's axis `contracted`."""
  return jax.lax.dot_general(
    a,
    b,
    (((1,), (contracted,)), ((), ())),
    precision=exact(a.dtype),
    preferred_element_type=jnp.float32,
  )
