# SPDX-License-Identifier: Apache-2.0
"""Every attention kernel of the platform against the portable path."""

import functools
from typing import Any
from typing import cast

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model.attention import attend
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model_config import ModelConfig
from scripts.benches.model import PAGE_TOKENS
from scripts.benches.rows import best_s
from scripts.device_checks.part import Budget
from scripts.device_checks.part import Figures
from scripts.device_checks.shapes import Sizes

KERNELS = {
  'gpu': ('jnp', 'pallas', 'cudnn'),
  'tpu': ('jnp', 'pallas', 'tpu_ragged'),
  'cpu': ('jnp', 'pallas'),
}
REPEATS = 10
# Largest difference from float32, of values about 1.
TOLERANCE = {'float32': 1e-2, 'bfloat16': 5e-2}


def measure(sizes: Sizes, figures: Figures, budget: Budget) -> None:
  """Time and error by model, step and kernel.

  Raises:
    RuntimeError: at the end, naming the kernels that failed.
  """
  platform = jax.devices()[0].platform
  failed = []
  for name, config in sizes.models:
    for step, rows, tokens in (
      ('decode', max(sizes.batch), 1),
      ('prefill', 1, sizes.chunk),
    ):
      args = _inputs(sizes, config, rows, tokens)
      expected = _exact(args)
      for kernel in KERNELS.get(platform, ('jnp',)):
        about = f'{name}.{step}.{kernel}'
        if not budget.fits(5):
          failed.append(f'{about}: no time left')
          continue
        try:
          figures[about] = _one(kernel, args, expected, sizes)
        except Exception as error:  # the other kernels are still of interest
          message = ' '.join(str(error).split())[:400]
          figures[about] = {'error': f'{type(error).__name__}: {message}'}
          failed.append(about)
  if failed:
    raise RuntimeError(f'kernels that failed: {failed}')


def _one(kernel: str, args, expected, sizes: Sizes) -> Figures:
  name = cast(AttentionKernel, kernel)
  run = jax.jit(functools.partial(attend, kernel=name))
  found = np.asarray(run(*args).astype(jnp.float32))
  error = float(np.abs(found - expected).max())
  assert error < TOLERANCE[sizes.dtype], f'off by {error}'
  seconds = best_s(lambda: run(*args), REPEATS)
  return {'seconds': seconds, 'max_error': error}


def _inputs(sizes: Sizes, config: ModelConfig, rows: int, tokens: int) -> Any:
  """Queries at the end of contexts; a decode step's have unequal lengths."""
  stop = (sizes.context if tokens == 1 else sizes.prefix) + tokens
  P = -(-stop // PAGE_TOKENS)
  K, G, H = config.num_kv_heads, config.num_groups, config.head_dim
  shape = (1, 1 + rows * P, 2, PAGE_TOKENS, K, H)
  kv = jax.random.normal(jax.random.key(0), shape, sizes.dtype)
  q = jax.random.normal(jax.random.key(1), (rows, tokens, K, G, H), sizes.dtype)
  rng = np.random.default_rng(0)
  table_BP = 1 + rng.permutation(rows * P).reshape(rows, P).astype(np.int32)
  start_B = np.full(rows, stop - tokens, np.int32)
  if tokens == 1:
    start_B = np.linspace(stop // 2, stop - 1, rows).astype(np.int32)
  rest = jax.device_put((table_BP, start_B, start_B + tokens))
  return q, kv, jnp.int32(0), *rest


def _exact(args) -> np.ndarray:
  """The portable path in float32."""
  q, kv, *rest = args
  with jax.default_matmul_precision('highest'):
    run = jax.jit(attend)
    found = run(q.astype(jnp.float32), kv.astype(jnp.float32), *rest)
  return np.asarray(found)
