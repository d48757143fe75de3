# SPDX-License-Identifier: Apache-2.0
"""Paged attention for TPUs, in Pallas by way of Mosaic.

The grid is (row, tile of queries, page); the pages of a row come into VMEM
one after the other, each while the one before is computed. The last axis ends
at the longest row; pages that a tile does not see are neither fetched nor
computed.

B batch, T query token, K KV head, G query heads a KV head, H head dim,
R = T * G query rows of a KV head, L layer, P page, C token in a page.
"""

import functools

import jax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from mooncake_jax.model.kernels import rows
from mooncake_jax.model.kernels import softmax

# Rows of a tile: sublanes of two vector registers in bfloat16.
LEAST_ROWS = 16
MOST_ROWS = 128
LANES = 128  # scratch arrays of one number a row fill whole registers
SUBLANES = 8  # rows of a register
WORD_BYTES = 4
# Of the 16 MiB that a program has by default; the rest is for the compiler.
VMEM_BYTES = 12 << 20


def fits(
  page_tokens: int, num_heads: int, head_dim: int, itemsize: int
) -> bool:
  """Whether pages of `num_heads` KV heads a device go into tiles and VMEM.

  VMEM holds most for a chunk: two pages, one computed and one on its way, two
  tiles of queries, two of outputs, and the sums. Of KV heads that fill no
  tiles, as 3 or half a word of one, XLA would copy the pool for the kernel.
  """
  page_bytes = 2 * page_tokens * num_heads * head_dim * itemsize
  rows_bytes = 4 * num_heads * MOST_ROWS * (4 * head_dim)
  sums_bytes = 4 * num_heads * MOST_ROWS * (2 * LANES + head_dim)
  used_bytes = 2 * page_bytes + rows_bytes + sums_bytes
  fills_tiles = num_heads % SUBLANES == 0 or num_heads in (1, 2, 4)
  fills_words = num_heads * itemsize % WORD_BYTES == 0
  is_tiled = head_dim % LANES == 0 and fills_tiles and fills_words
  return is_tiled and used_bytes <= VMEM_BYTES


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
  """Returns the output [B, T, K, G, H] of the heads of one device."""
  B, T, K, G, H = q_BTKGH.shape
  C = kv_LP2CKH.shape[3]
  tile = min(MOST_ROWS, -(-T * G // LEAST_ROWS) * LEAST_ROWS)
  q_BKRH = rows.pack(q_BTKGH * H**-0.5, tile)
  R = q_BKRH.shape[2]
  seen = functools.partial(
    _seen, tile=tile, groups=G, page_tokens=C, window=window
  )

  def page(b, r, i, layer_ref, table_ref, start_ref, stop_ref):
    first, last = seen(b, r, start_ref, stop_ref)
    i = jnp.clip(i, first, jnp.maximum(last - 1, first))
    return layer_ref[0], table_ref[b, i], 0, 0, 0, 0

  rows_of = pl.BlockSpec((None, K, tile, H), lambda b, r, i, *_: (b, 0, r, 0))
  pages_of = pl.BlockSpec((None, None, 2, C, K, H), page)
  kernel = functools.partial(
    _kernel, seen=seen, tile=tile, groups=G, window=window
  )
  out_BKRH = pl.pallas_call(
    kernel,
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(B, R // tile, jnp.maximum(pl.cdiv(jnp.max(stop_B), C), 1)),
      in_specs=[rows_of, pages_of],
      out_specs=rows_of,
      scratch_shapes=[
        tpu.VMEM((K, tile, LANES), jnp.float32),
        tpu.VMEM((K, tile, LANES), jnp.float32),
        tpu.VMEM((K, tile, H), jnp.float32),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, R, H), q_BTKGH.dtype),
    interpret=interpret,
    name='paged_attention',
  )(layer[None], page_table_BP, start_B, stop_B, q_BKRH, kv_LP2CKH)
  return rows.unpack(out_BKRH, T, G)


def _seen(b, r, start_ref, stop_ref, *, tile, groups, page_tokens, window):
  """Pages [first, last) that tile r of row b sees."""
  start = start_ref[b]
  end = start + _divide(r * tile + tile - 1, groups) + 1
  stop = jnp.minimum(stop_ref[b], end)
  last = _divide(stop + page_tokens - 1, page_tokens)
  if window is None:
    return 0, last
  oldest = start + _divide(r * tile, groups) - window + 1
  return _divide(jnp.maximum(oldest, 0), page_tokens), last


def _divide(a, b: int):
  """a / b, rounded down, of a >= 0: `//` asks for signs."""
  return jax.lax.div(a, jnp.asarray(b, a.dtype))


def _kernel(
  layer_ref,
  table_ref,
  start_ref,
  stop_ref,
  q_ref,
  kv_ref,
  out_ref,
  top_ref,
  sum_ref,
  acc_ref,
  *,
  seen,
  tile,
  groups,
  window,
):
  b, r, i = (pl.program_id(axis) for axis in range(3))
  C, K = kv_ref.shape[1:3]
  first, last = seen(b, r, start_ref, stop_ref)

  @pl.when(i == 0)
  def _():
    top_ref[...] = jnp.full_like(top_ref, softmax.MASKED)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

  @pl.when((i >= first) & (i < last))
  def _():
    row_RC = jax.lax.broadcasted_iota(jnp.int32, (tile, C), 0)
    token_RC = i * C + jax.lax.broadcasted_iota(jnp.int32, (tile, C), 1)
    position_RC = start_ref[b] + _divide(r * tile + row_RC, groups)
    seen_RC = token_RC <= position_RC
    if window is not None:
      seen_RC &= token_RC > position_RC - window
    for k in range(K):
      sums = softmax.Sums(top_ref[k, :, 0], sum_ref[k, :, 0], acc_ref[k])
      sums = softmax.add(
        sums, q_ref[k], kv_ref[0, :, k, :], kv_ref[1, :, k, :], seen_RC
      )
      top_ref[k] = jnp.broadcast_to(sums.top_R[:, None], (tile, LANES))
      sum_ref[k] = jnp.broadcast_to(sums.sum_R[:, None], (tile, LANES))
      acc_ref[k] = sums.out_RH

  @pl.when(i == pl.num_programs(2) - 1)
  def _():
    for k in range(K):
      total_R1 = jnp.maximum(sum_ref[k, :, :1], 1e-30)
      out_ref[k] = (acc_ref[k] / total_R1).astype(out_ref.dtype)
