# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most, measured in the same run.

Each limit is the simplest program that does nothing else: one large matrix
product, one pass over a large matrix, one copy.
"""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from scripts.benches.rows import best_s

READ_BYTES = 256 << 20  # of one read
GEMM_FLOPS = 2 * 512 * 2048 * 2048  # of one product


def gemm(count: int = 1) -> None:
  """float32 matrix products [512, 2048] x [2048, 2048]."""
  x_TD = jnp.ones((512, 2048))
  w_DF = jnp.ones((2048, 2048))
  for _ in range(count):
    jax.block_until_ready(_product(x_TD, w_DF))


def read(count: int = 1) -> None:
  """Vector-matrix products over 256 MiB of float32."""
  x_TD = jnp.ones((1, 4096))
  for _ in range(count):
    jax.block_until_ready(_product(x_TD, _wide()))


@functools.cache
def _wide() -> jax.Array:
  return jnp.ones((4096, READ_BYTES // 4 // 4096))


def copy_bytes_per_s(num_bytes: int, repeats: int) -> float:
  """memcpy into memory that is already mapped."""
  source = np.ones(num_bytes // 4, np.float32)
  target = np.zeros_like(source)
  return num_bytes / best_s(lambda: np.copyto(target, source), repeats)


@jax.jit
def _product(x_TD: jax.Array, w_DF: jax.Array) -> jax.Array:
  return x_TD @ w_DF
