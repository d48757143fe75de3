# SPDX-License-Identifier: Apache-2.0
"""Attention of one query a row over paged KVCache: the portable path.

A step's work is a list of (row, page) pairs, so many pages at a time as fit
near the processor: it costs the sum of the rows' lengths, however unequal
they are. Rows of 3 and 130 tokens in pages of 64 are the pairs (0, 0),
(1, 0), (1, 1), (1, 2).

B batch row, K KV head, G query heads a KV head, H head dim, N = K * G,
X = K * H, L layer, P page, C token in a page, J all pairs, I some of them.
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp

from mooncake_jax.model.kernels.softmax import exact
from mooncake_jax.model.kernels.softmax import MASKED

# Tokens at a time. More of them leave the cache of the CPUs measured here
# (LOG.md); fewer are more program parts to run.
TURN_TOKENS = 512


class Pairs(NamedTuple):
  """The (row, page) pairs of a batch, padded beyond its table's size.

  Attributes:
    row_J: int32.
    page_J: int32, in the pool.
    offset_J: int32, position of the page's first token; padding's is past
      every query.
    count: int32 scalar, pairs that are no padding.
  """

  row_J: jax.Array
  page_J: jax.Array
  offset_J: jax.Array
  count: jax.Array


def attend(
  q_BKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: jax.Array,
  page_table_BP: jax.Array,
  position_B: jax.Array,
  stop_B: jax.Array,
  window: int | None,
) -> jax.Array:
  """Returns the output [B, K, G, H] of the heads of one device.

  Row b's query stands at position_B[b]; its keys lie at [0, stop_B[b]).
  """
  K, H = q_BKGH.shape[1], q_BKGH.shape[3]
  C = kv_LP2CKH.shape[3]
  q_BNX = _widen(q_BKGH * H**-0.5)
  num = min(max(1, TURN_TOKENS // C), page_table_BP.size)
  pairs = _pairs(page_table_BP, position_B, stop_B, C, window, num)

  def turn(i, carry):
    row_I, page_I, offset_I = (
      jax.lax.dynamic_slice_in_dim(a, i * num, num) for a in pairs[:3]
    )
    position_I1 = position_B[row_I][:, None]
    token_IC = offset_I[:, None] + jnp.arange(C)[None]
    visible_IC = token_IC <= position_I1
    if window is not None:
      visible_IC &= token_IC > position_I1 - window
    k_ICX, v_ICX = (read(kv_LP2CKH, layer, page_I, i) for i in range(2))
    return _accumulate(carry, q_BNX, row_I, k_ICX, v_ICX, visible_IC)

  zero_BNX = (q_BNX * 0).astype(jnp.float32)
  carry = (zero_BNX[..., 0] + MASKED, zero_BNX[..., 0], zero_BNX)
  turns = -(-pairs.count // num)
  _, l_BN, o_BNX = jax.lax.fori_loop(0, turns, turn, carry)
  # A row without a key runs no turn: 0 / 0 must not reach page 0.
  o_BNX /= jnp.maximum(l_BN, 1e-30)[..., None]
  return _narrow(o_BNX, K).astype(q_BKGH.dtype)


def _pairs(
  page_table_BP, position_B, stop_B, page_tokens, window, multiple
) -> Pairs:
  """Of the pages that any query sees, row after row."""
  B, P = page_table_BP.shape
  first_B = jnp.zeros_like(stop_B)
  if window is not None:
    first_B = jnp.maximum(position_B - window + 1, 0) // page_tokens
  count_B = jnp.maximum(-(-stop_B // page_tokens) - first_B, 0)
  end_B = jnp.cumsum(count_B)
  j_J = jnp.arange(-(-B * P // multiple) * multiple)
  row_J = jnp.sum(end_B[None] <= j_J[:, None], axis=1, dtype=jnp.int32)
  row_J = jnp.minimum(row_J, B - 1)
  index_J = first_B[row_J] + j_J - (end_B - count_B)[row_J]
  page_J = page_table_BP[row_J, jnp.clip(index_J, 0, P - 1)]
  past = P * page_tokens
  offset_J = jnp.where(j_J < end_B[-1], index_J * page_tokens, past)
  return Pairs(row_J, page_J, offset_J, end_B[-1])


def read(kv_LP2CKH, layer, pages, which):
  """Keys (0) or values (1) of pages, in the pages' own order [..., C, X].

  What is reshaped is what was gathered: a TPU, which stores arrays in tiles,
  would copy the whole pool to give that another shape.
  """
  at = kv_LP2CKH.at[layer, pages, which]
  pages_CKH = at.get(mode='promise_in_bounds')
  return pages_CKH.reshape(*pages_CKH.shape[:-2], -1)


def _accumulate(carry, q_BNX, row_I, k_ICX, v_ICX, visible_IC):
  """Adds some pairs to their rows' maximum, sum and weighted values."""
  m_BN, l_BN, o_BNX = carry
  B = len(q_BNX)
  own_BI = row_I[None] == jnp.arange(B)[:, None]
  s_INC = _dot('INX,ICX->INC', q_BNX[row_I], k_ICX.astype(q_BNX.dtype))
  s_INC = jnp.where(visible_IC[:, None], s_INC, MASKED)
  top_IN = s_INC.max(axis=-1)
  top_BIN = jnp.where(own_BI[..., None], top_IN[None], MASKED)
  top_BN = jnp.maximum(m_BN, top_BIN.max(axis=1))
  p_INC = jnp.exp(s_INC - top_BN[row_I][..., None]) * visible_IC[:, None]
  pv_INX = _dot('INC,ICX->INX', p_INC.astype(q_BNX.dtype), v_ICX)
  keep_BN = jnp.exp(m_BN - top_BN)
  own_BI = own_BI.astype(jnp.float32)
  l_BN = l_BN * keep_BN + _dot('BI,IN->BN', own_BI, p_INC.sum(axis=-1))
  pv_BNX = _dot('BI,INX->BNX', own_BI, pv_INX)
  return top_BN, l_BN, o_BNX * keep_BN[..., None] + pv_BNX


def _dot(subscripts, a, b):
  return jnp.einsum(
    subscripts,
    a,
    b.astype(a.dtype),
    precision=exact(a.dtype),
    preferred_element_type=jnp.float32,
  )


def _widen(q_BKGH):
  """Queries of one wide head, zero outside their own: [B, N, X].

  A decode step is bound by reading the KVCache: K times the multiplications
  are cheaper than any other order of its bytes. For K = 2 and H = 1, the
  queries a and b of the two heads become (a, 0) and (0, b).
  """
  B, K, G, H = q_BKGH.shape
  own_KJ = jnp.eye(K, dtype=q_BKGH.dtype)
  wide = _dot('BKGH,KJ->BKGJH', q_BKGH, own_KJ).astype(q_BKGH.dtype)
  return wide.reshape(B, K * G, K * H)


def _narrow(o_BNX, num_kv_heads):
  """Each query's own part of the wide head: [B, K, G, H]."""
  B, N, X = o_BNX.shape
  K = num_kv_heads
  own_KJ = jnp.eye(K, dtype=o_BNX.dtype)
  wide_BKGJH = o_BNX.reshape(B, K, N // K, K, X // K)
  return _dot('BKGJH,KJ->BKGH', wide_BKGJH, own_KJ)
