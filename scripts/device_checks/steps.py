# SPDX-License-Identifier: Apache-2.0
"""Prefill chunks and decode steps of whole models, as shares of the peaks."""

from typing import cast

import jax

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model_config import ModelConfig
from scripts.benches.model import Model
from scripts.benches.rows import best_s
from scripts.device_checks.part import Budget
from scripts.device_checks.part import Figures
from scripts.device_checks.shapes import Sizes

REPEATS = 5
# A model takes about so long to make and compile.
LEAST_S = 20.0


def measure(
  sizes: Sizes, limits: Figures, figures: Figures, budget: Budget
) -> None:
  """Throughput by model and kernel; the largest model first."""
  on_cpu = jax.devices()[0].platform == 'cpu'
  for name, config in sizes.models:
    for kernel in ('jnp',) if on_cpu else ('jnp', 'pallas'):
      if not budget.fits(0 if on_cpu else LEAST_S):
        figures[f'{name}.{kernel}'] = {'error': 'no time left'}
        continue
      found = figures[f'{name}.{kernel}'] = {}
      _model(sizes, config, cast(AttentionKernel, kernel), limits, found)


def _model(
  sizes: Sizes,
  config: ModelConfig,
  kernel: AttentionKernel,
  limits: Figures,
  found: Figures,
) -> None:
  longest = max(sizes.prefix + sizes.chunk, sizes.context + 64)
  model = Model(
    longest, max(sizes.batch), config, sizes.dtype, kernel, unroll=False
  )
  for prefix in (0, sizes.prefix):
    seconds = best_s(lambda p=prefix: model.prefill(sizes.chunk, p), REPEATS)
    flops = config.prefill_flops(prefix, prefix + sizes.chunk)
    found[f'prefill.{sizes.chunk}_on_{prefix}'] = {
      'seconds': seconds,
      'tokens_per_s': sizes.chunk / seconds,
      'flops_per_s': flops / seconds,
      'matmul_share': flops / seconds / limits['matmul_flops_per_s'],
    }
  itemsize = jax.numpy.dtype(sizes.dtype).itemsize
  for batch in sizes.batch:
    state = model.batch([sizes.context - 1] * batch)
    seconds = best_s(lambda s=state: model.decode(s).tokens_B, REPEATS)
    num_bytes = model.step_bytes
    num_bytes += kv_bytes(config, batch * sizes.context, itemsize)
    found[f'decode.{batch}x{sizes.context}'] = {
      'seconds': seconds,
      'tokens_per_s': batch / seconds,
      'bytes_per_s': num_bytes / seconds,
      'copy_share': num_bytes / seconds / limits['copy_bytes_per_s'],
      'read_share': num_bytes / seconds / limits['read_bytes_per_s'],
    }
