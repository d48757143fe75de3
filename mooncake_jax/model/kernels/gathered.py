# SPDX-License-Identifier: Apache-2.0
"""JAX's own attention kernels, fed from gathered pages.

Their layouts are not the pool's: cuDNN takes each row's keys in one piece,
the ragged kernel for TPUs pages whose keys and values alternate by head. So
every call copies the whole page table's pages first: these serve to compare
with, and for prompts that fill the table.

B batch, T query token, K KV head, G query heads a KV head, H head dim,
N = K * G, L layer, P page of a row's table, C token in a page, S = P * C.
"""

from typing import Literal

import jax
from jax import numpy as jnp


def cudnn(
  q_BTKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  window: int | None,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> jax.Array:
  """Returns [B, T, K, G, H] by `jax.nn.dot_product_attention`.

  cuDNN takes bfloat16 and float16 only.
  """
  B, T, K, G, H = q_BTKGH.shape
  pages_BP2CKH = kv_LP2CKH[layer, page_table_BP]
  S = pages_BP2CKH.shape[1] * pages_BP2CKH.shape[3]
  k_BSKH, v_BSKH = (
    pages_BP2CKH[:, :, i].reshape(B, S, K, H).astype(q_BTKGH.dtype)
    for i in range(2)
  )
  q_BTNH = q_BTKGH.reshape(B, T, K * G, H)
  position_BT = start_B[:, None] + jnp.arange(T)[None]
  token_11S = jnp.arange(S)[None, None]
  seen_BTS = token_11S <= position_BT[:, :, None]
  if window is not None:
    seen_BTS &= token_11S > position_BT[:, :, None] - window
  o_BTNH = jax.nn.dot_product_attention(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    mask=seen_BTS[:, None],
    implementation=implementation,
  )
  return o_BTNH.reshape(q_BTKGH.shape)


def tpu_ragged(
  q_BTKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  window: int | None,
) -> jax.Array:
  """Returns [B, T, K, G, H] by JAX's ragged paged attention for TPUs.

  Takes one row of many queries, or rows of one: `stop_B` says how many of a
  row's are valid.
  """
  from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged

  B, T, K, G, H = q_BTKGH.shape
  assert B == 1 or T == 1, q_BTKGH.shape
  P = page_table_BP.shape[1]
  pages_BP2CKH = kv_LP2CKH[layer, page_table_BP]
  pages_BPCK2H = jnp.transpose(pages_BP2CKH, (0, 1, 3, 4, 2, 5))
  C = pages_BPCK2H.shape[2]
  lengths_B = jnp.maximum(stop_B, 1)
  counts_B = jnp.minimum(lengths_B - start_B, T)
  ends_B = jnp.cumsum(counts_B, dtype=jnp.int32)
  o_RNH = ragged.ragged_paged_attention(
    q_BTKGH.reshape(B * T, K * G, H),
    pages_BPCK2H.reshape(B * P, C, 2 * K, H).astype(q_BTKGH.dtype),
    lengths_B,
    jnp.arange(B * P, dtype=jnp.int32).reshape(B, P),
    jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B]),
    jnp.array([B], jnp.int32),
    sm_scale=H**-0.5,
    sliding_window=window,
  )
  return o_RNH.reshape(q_BTKGH.shape)
