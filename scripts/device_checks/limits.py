# SPDX-License-Identifier: Apache-2.0
"""The device's peaks, measured: what all shares are shares of."""

import functools

import jax
from jax import numpy as jnp

from scripts.benches.rows import best_s
from scripts.device_checks.part import Budget
from scripts.device_checks.part import Figures
from scripts.device_checks.shapes import Sizes

REPEATS = 10


def measure(sizes: Sizes, figures: Figures, budget: Budget) -> None:
  """Matrix products, copies on the device, reads by a vector product."""
  n = sizes.gemm
  a, b = (jnp.ones((n, n), sizes.dtype) for _ in range(2))
  seconds = best_s(lambda: _product(a, b), REPEATS)
  figures['matmul_flops_per_s'] = 2 * n**3 / seconds
  x = jnp.ones(sizes.bytes // 4, jnp.float32)
  seconds = best_s(lambda: _copy(x), REPEATS)
  figures['copy_bytes_per_s'] = 2 * x.nbytes / seconds
  wide = jnp.ones((1024, sizes.bytes // 4096), jnp.float32)
  row = jnp.ones((1, 1024), jnp.float32)
  seconds = best_s(lambda: _product(row, wide), REPEATS)
  figures['read_bytes_per_s'] = wide.nbytes / seconds


@jax.jit
def _product(a, b):
  return a @ b


@functools.partial(jax.jit)
def _copy(x):
  return x + 1
