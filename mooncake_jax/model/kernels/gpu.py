# SPDX-License-Identifier: Apache-2.0
"""Paged attention for GPUs, in Pallas by way of Triton.

A program takes some queries of one KV head of one row and goes over its
pages. A decode step has few queries: there a row's pages are split among
programs, and what they found is put together (FlashDecoding).

B batch, T query token, K KV head, G query heads a KV head, H head dim,
R = T * G query rows of a KV head, L layer, P page, C token in a page,
J part of a row's pages.
"""

import functools

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from mooncake_jax.model.kernels import rows
from mooncake_jax.model.kernels import softmax

# Triton multiplies matrices of at least 16 rows and columns.
LEAST_ROWS = 16
MOST_ROWS = 64
MOST_KEYS = 64
# Parts of a row's pages in a decode step: enough to keep some hundred
# multiprocessors busy at a batch of one row and eight KV heads.
DECODE_PARTS = 16


def _is_tile(size: int) -> bool:
  return size >= LEAST_ROWS and not size & (size - 1)


def attend(
  q_BTKGH: jax.Array,
  kv_LP2CKH: jax.Array,
  layer: jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  window: int | None,
  interpret: bool = False,
) -> jax.Array:
  """Returns the output [B, T, K, G, H] of the heads of one device.

  Raises:
    ValueError: pages or heads are no powers of two, as Triton's tiles are.
  """
  B, T, K, G, H = q_BTKGH.shape
  C = kv_LP2CKH.shape[3]
  for name, size in (('page_tokens', C), ('head_dim', H)):
    if not _is_tile(size):
      raise ValueError(
        f'attention on GPU: {name}={size} must be a power of two, at least '
        f'{LEAST_ROWS}'
      )
  tile = min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(T * G)))
  parts = DECODE_PARTS if T == 1 else 1
  q_BKRH = rows.pack(q_BTKGH * H**-0.5, tile)
  R = q_BKRH.shape[2]
  kernel = functools.partial(
    _kernel, tile=tile, parts=parts, groups=G, window=window
  )
  whole = pl.BlockSpec(memory_space=pl.ANY)
  rows_of = pl.BlockSpec(
    (None, None, tile, H), lambda b, k, j: (b, k, j // parts, 0)
  )
  out_of = pl.BlockSpec(
    (None, None, None, tile, H),
    lambda b, k, j: (b, k, j % parts, j // parts, 0),
  )
  sums_of = pl.BlockSpec(
    (None, None, None, tile), lambda b, k, j: (b, k, j % parts, j // parts)
  )
  top_BKJR, sum_BKJR, out_BKJRH = pl.pallas_call(
    kernel,
    grid=(B, K, R // tile * parts),
    in_specs=[whole, whole, whole, whole, rows_of, whole],
    out_specs=[sums_of, sums_of, out_of],
    out_shape=[
      jax.ShapeDtypeStruct((B, K, parts, R), jnp.float32),
      jax.ShapeDtypeStruct((B, K, parts, R), jnp.float32),
      jax.ShapeDtypeStruct((B, K, parts, R, H), jnp.float32),
    ],
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
    name='paged_attention',
  )(layer[None], page_table_BP, start_B, stop_B, q_BKRH, kv_LP2CKH)
  out_BKRH = _put_together(top_BKJR, sum_BKJR, out_BKJRH)
  return rows.unpack(out_BKRH, T, G).astype(q_BTKGH.dtype)


def _put_together(top_BKJR, sum_BKJR, out_BKJRH):
  """The whole softmax from those of parts [B, K, R, H]."""
  top_BK1R = jnp.max(top_BKJR, axis=2, keepdims=True)
  weight_BKJR = jnp.exp(top_BKJR - top_BK1R)
  sum_BKR = jnp.sum(sum_BKJR * weight_BKJR, axis=2)
  out_BKRH = jnp.sum(out_BKJRH * weight_BKJR[..., None], axis=2)
  return out_BKRH / jnp.maximum(sum_BKR, 1e-30)[..., None]


def _kernel(
  layer_ref,
  table_ref,
  start_ref,
  stop_ref,
  q_ref,
  kv_ref,
  top_ref,
  sum_ref,
  out_ref,
  *,
  tile,
  parts,
  groups,
  window,
):
  b, k, j = (pl.program_id(i) for i in range(3))
  C, H = kv_ref.shape[3], kv_ref.shape[5]
  keys = min(C, MOST_KEYS)
  layer, start = layer_ref[0], start_ref[b]
  row_R = j // parts * tile + jnp.arange(tile)
  position_R = start + row_R // groups
  last = start + (j // parts * tile + tile - 1) // groups
  stop = jnp.minimum(stop_ref[b], last + 1)
  first = 0
  if window is not None:
    first = jnp.maximum(start + j // parts * tile // groups - window + 1, 0)
  first, last = first // keys, pl.cdiv(stop, keys)
  each = pl.cdiv(last - first, parts)
  first = first + j % parts * each
  q_RH = q_ref[...]

  def step(i, sums):
    page = table_ref[b, i * keys // C]
    at = pl.ds(i * keys % C, keys)
    k_CH = kv_ref[layer, page, 0, at, k, :]
    v_CH = kv_ref[layer, page, 1, at, k, :]
    token_C = i * keys + jnp.arange(keys)
    seen_RC = softmax.visible(position_R, token_C, window)
    return softmax.add(sums, q_RH, k_CH, v_CH, seen_RC)

  sums = jax.lax.fori_loop(
    first, jnp.minimum(first + each, last), step, softmax.empty(tile, H)
  )
  top_ref[...], sum_ref[...], out_ref[...] = sums
