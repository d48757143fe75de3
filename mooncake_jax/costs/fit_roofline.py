# SPDX-License-Identifier: Apache-2.0
"""Finds the shares of a device's peaks that a `RooflineCost` has reached.

They are the device's and its software's, so costs fitted to one model are
costs of others too, which a polynomial's coefficients are not.
"""

from typing import NamedTuple

import numpy as np

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import fit_terms
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.fit import Terms
from mooncake_jax.costs.points import Points
from mooncake_jax.model_config import ModelConfig


class Sheet(NamedTuple):
  """A data sheet: peaks of one device, in `dtype_bytes`."""

  peak_flops_per_s: float
  hbm_bytes_per_s: float
  dtype_bytes: int = 2


def fit_roofline(
  config: ModelConfig, sheet: Sheet, num_devices: int, points: Points
) -> dict[str, float]:
  """Fields of `RooflineCost` by name, from chunks that are bound by
  arithmetic and steps that are bound by reading.

  Raises:
    ValueError: fewer than 3 samples of a kind, or shares that they do not
      tell: times that do not grow with the work.
  """
  peak = sheet.peak_flops_per_s * num_devices

  def chunk(s: PrefillSample) -> tuple[float, ...]:
    span = s.prefix_tokens, s.prefix_tokens + s.chunk_tokens
    attention = config.attention_flops(*span)
    rest = config.prefill_flops(*span) - attention
    return 1, rest / peak, attention / peak

  def step(s: DecodeSample) -> tuple[float, ...]:
    read = config.num_params * sheet.dtype_bytes
    read += kv_bytes(config, s.context_tokens, sheet.dtype_bytes)
    return 1, s.batch_size, read / sheet.hbm_bytes_per_s / num_devices

  prefill = fit_terms(
    Terms(('prefill_overhead_s', 'mfu', 'attention_mfu'), chunk), points.prefill
  ).coefficients
  decode = fit_terms(
    Terms(('decode_overhead_s', 'decode_row_s', 'mbu'), step), points.decode
  ).coefficients
  found = prefill | decode
  for name in ('mfu', 'attention_mfu', 'mbu'):
    if not found[name]:
      raise ValueError(f'fit_roofline: the times do not tell {name}')
    # Above 1 where caches help: no share of a peak is.
    found[name] = float(np.clip(1 / found[name], 0.0, 1.0))
  return found
