# SPDX-License-Identifier: Apache-2.0
"""Queries in rows, KV head by KV head, as our kernels take them.

B batch, T query token, K KV head, G query heads a KV head, H head dim,
R query row.
"""

import jax
from jax import numpy as jnp


def pack(q_BTKGH: jax.Array, tile: int) -> jax.Array:
  """[B, K, R, H]: row r is query r % G of token r // G, padded to a tile.

  Padding stands behind the tokens and sees what they see.
  """
  B, T, K, G, H = q_BTKGH.shape
  q_BKRH = jnp.swapaxes(q_BTKGH, 1, 2).reshape(B, K, T * G, H)
  return jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, -T * G % tile), (0, 0)))


def unpack(out_BKRH: jax.Array, num_tokens: int, num_groups: int) -> jax.Array:
  """[B, T, K, G, H] of rows as `pack` makes them."""
  B, K, _, H = out_BKRH.shape
  T, G = num_tokens, num_groups
  out_BKTGH = out_BKRH[:, :, : T * G].reshape(B, K, T, G, H)
  return jnp.swapaxes(out_BKTGH, 1, 2)
