# SPDX-License-Identifier: Apache-2.0
"""Cost models for tests."""

from dataclasses import replace

from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.roofline import RooflineCost
from mooncake_jax.model_config import ModelConfig

LLAMA_70B = ModelConfig(
  family='llama',
  vocab_size=128256,
  model_dim=8192,
  mlp_dim=28672,
  num_layers=80,
  num_heads=64,
  num_kv_heads=8,
  head_dim=128,
  max_tokens=131072,
)


def polynomial(**changes) -> PolynomialCost:
  links = {f'{link}_bytes_per_s': 1e9 for link in LINKS}
  latencies = {f'{link}_latency_s': 1e-4 for link in LINKS}
  cost = PolynomialCost(
    prefill_base_s=2e-3,
    prefill_s_per_prefix_token=1e-6,
    prefill_s_per_token=1e-4,
    prefill_s_per_token_squared=1e-9,
    decode_base_s=8e-3,
    decode_s_per_row=1e-4,
    decode_s_per_context_token=1e-7,
    **links,
    **latencies,
  )
  return replace(cost, **changes)


def roofline(flops_per_s=312e12, hbm_bytes_per_s=2.039e12) -> RooflineCost:
  """Eight A800 by default, as in the paper."""
  return RooflineCost(
    config=LLAMA_70B,
    peak_flops_per_s=flops_per_s,
    hbm_bytes_per_s=hbm_bytes_per_s,
    num_devices=8,
    onload_bytes_per_s=128e9,
    offload_bytes_per_s=128e9,
    copy_bytes_per_s=100e9,
    handoff_bytes_per_s=100e9,
  )
