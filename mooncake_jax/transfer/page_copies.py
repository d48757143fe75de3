# SPDX-License-Identifier: Apache-2.0
"""Blocks out of and into a KV pool, and how many pages are copied at once.

Compiles once a number of pages and of layers: which ones is traced. Called on
the thread that owns the pool, for it is donated.

L layer, P page, C token in a page, n pages, S = n * C, K KV head, H head dim.
"""

from functools import partial

import jax
from jax import numpy as jnp
import numpy as np


@partial(jax.jit, static_argnames='num_layers')
def copy_out(
  kv_LP2CKH: jax.Array,
  pages_n: jax.Array | np.ndarray,
  start_layer: jax.Array | np.int32,
  num_layers: int,
) -> jax.Array:
  """Returns pages of layers from `start_layer` as a block [L, 2, S, K, H]."""
  layers_L1 = (start_layer + jnp.arange(num_layers))[:, None]
  pages_Ln2CKH = kv_LP2CKH[layers_L1, pages_n[None]]
  L, n, _, C, K, H = pages_Ln2CKH.shape
  return jnp.swapaxes(pages_Ln2CKH, 1, 2).reshape(L, 2, n * C, K, H)


@partial(jax.jit, donate_argnames='kv_LP2CKH')
def copy_in(
  kv_LP2CKH: jax.Array,
  pages_n: jax.Array | np.ndarray,
  start_layer: jax.Array | np.int32,
  block_L2SKH: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes a block into pages, in place, page by page.

  Returns the pool and a scalar that is ready when the copy is: the pool
  itself is soon donated to a next step and cannot be waited for.
  """
  L, _, S, K, H = block_L2SKH.shape
  n = len(pages_n)
  C = S // n
  assert C * n == S and C == kv_LP2CKH.shape[3], (kv_LP2CKH.shape, S, n)
  block_L2nCKH = block_L2SKH.reshape(L, 2, n, C, K, H)

  def write(i, kv_LP2CKH):
    page_L21CKH = jax.lax.dynamic_slice_in_dim(block_L2nCKH, i, 1, axis=2)
    page_L12CKH = jnp.swapaxes(page_L21CKH, 1, 2)
    at = (start_layer, pages_n[i], 0, 0, 0, 0)
    return jax.lax.dynamic_update_slice(kv_LP2CKH, page_L12CKH, at)

  return jax.lax.fori_loop(0, n, write, kv_LP2CKH), pages_n[0]


def split_pages(num_pages: int, sizes: tuple[int, ...]) -> list[slice]:
  """Cuts `num_pages` into runs of the given sizes, largest first.

  With sizes (1, 2, 4): 7 -> 4 + 2 + 1. `sizes` must have 1.
  """
  runs, at = [], 0
  for size in sorted(sizes, reverse=True):
    while num_pages - at >= size:
      runs.append(slice(at, at + size))
      at += size
  assert at == num_pages, (num_pages, sizes)
  return runs
