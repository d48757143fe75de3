# SPDX-License-Identifier: Apache-2.0
"""Attention over paged KVCache, block by block: the portable path.

A loop over blocks of keys with the running maximum and sum of a softmax
(FlashAttention's recurrence). The loop ends at the longest row, so the cost
follows real lengths, not the size of the page table.

B batch, T query token, S key token, L layer, K KV head, G query heads a KV
head, H head dim, P page, C token in a page. Row b's query t stands at
position start_B[b] + t and sees the keys at positions up to its own.
"""

import jax
from jax import numpy as jnp

BLOCK_TOKENS = 256
_MASKED = -1e30  # finite: a fully masked block must not give NaN


def pad_table(page_table_BP: jax.Array, page_tokens: int) -> jax.Array:
  """Pads with scratch page 0 to whole key blocks."""
  pages = max(1, BLOCK_TOKENS // page_tokens)
  missing = -page_table_BP.shape[1] % pages
  return jnp.pad(page_table_BP, ((0, 0), (0, missing)))


def attend(
  q_BTKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: int | jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  window: int | None = None,
) -> jax.Array:
  """Returns the attention output [B, T, K, G, H] of one layer.

  Args:
    page_table_BP: padded by `pad_table`.
    stop_B: keys of row b lie at [0, stop_B[b]).
    window: a query sees so many keys, its own included; None is all.
  """
  B, T, K, G, H = q_BTKGH.shape
  C = kv_LP2CKH.shape[3]
  n = max(1, BLOCK_TOKENS // C)
  S = n * C
  q_BKGTH = jnp.transpose(q_BTKGH * H**-0.5, (0, 2, 3, 1, 4))
  q_position_BT = start_B[:, None] + jnp.arange(T)[None]

  def step(i, carry):
    m_BKGT, l_BKGT, o_BKGTH = carry
    pages_Bn = jax.lax.dynamic_slice_in_dim(page_table_BP, i * n, n, axis=1)
    k_BSKH = kv_LP2CKH[layer, pages_Bn, 0].reshape(B, S, K, H)
    v_BSKH = kv_LP2CKH[layer, pages_Bn, 1].reshape(B, S, K, H)
    s_BKGTS = jnp.einsum(
      'BKGTH,BSKH->BKGTS',
      q_BKGTH,
      k_BSKH,
      preferred_element_type=jnp.float32,
    )
    visible_BTS = _visible(q_position_BT, i * S + jnp.arange(S), window)
    s_BKGTS = jnp.where(visible_BTS[:, None, None], s_BKGTS, _MASKED)
    top_BKGT = jnp.maximum(m_BKGT, s_BKGTS.max(axis=-1))
    p_BKGTS = jnp.exp(s_BKGTS - top_BKGT[..., None])
    keep_BKGT = jnp.exp(m_BKGT - top_BKGT)
    l_BKGT = l_BKGT * keep_BKGT + p_BKGTS.sum(axis=-1)
    pv_BKGTH = jnp.einsum(
      'BKGTS,BSKH->BKGTH',
      p_BKGTS.astype(v_BSKH.dtype),
      v_BSKH,
      preferred_element_type=jnp.float32,
    )
    return top_BKGT, l_BKGT, o_BKGTH * keep_BKGT[..., None] + pv_BKGTH

  zero_BKGTH = (q_BKGTH * 0).astype(jnp.float32)
  zero_BKGT = zero_BKGTH[..., 0]
  first, last = _blocks(start_B, stop_B, S, window)
  carry = (zero_BKGT + _MASKED, zero_BKGT, zero_BKGTH)
  _, l_BKGT, o_BKGTH = jax.lax.fori_loop(first, last, step, carry)
  # A batch without a valid row runs no block: 0 / 0 must not reach page 0.
  l_BKGT = jnp.maximum(l_BKGT, 1e-30)
  o_BKGTH = (o_BKGTH / l_BKGT[..., None]).astype(q_BTKGH.dtype)
  return jnp.transpose(o_BKGTH, (0, 3, 1, 2, 4))


def _visible(q_position_BT, k_position_S, window):
  q_BT1 = q_position_BT[:, :, None]
  k_11S = k_position_S[None, None]
  causal = k_11S <= q_BT1
  return causal if window is None else causal & (k_11S > q_BT1 - window)


def _blocks(start_B, stop_B, block_tokens, window):
  """Key blocks [first, last) that any row sees."""
  last = -(-jnp.max(stop_B) // block_tokens)
  if window is None:
    return 0, last
  oldest = jnp.min(jnp.where(stop_B > 0, start_B, jnp.max(stop_B)))
  return jnp.maximum(oldest - window + 1, 0) // block_tokens, last
