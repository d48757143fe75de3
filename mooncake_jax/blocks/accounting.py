# SPDX-License-Identifier: Apache-2.0
"""Bytes of KVCache and the peak of a device, as the engine allocates them.

M_KV = 2 * L * N * H_kv * D_h * b: keys and values of N tokens in L layers,
H_kv heads of D_h numbers of b bytes.
"""

import math

from mooncake_jax.model_config import ModelConfig


def kv_bytes(config: ModelConfig, num_tokens: int, dtype_bytes: int) -> int:
  """Bytes of the KVCache of `num_tokens` tokens, all layers, all heads."""
  heads = config.num_kv_heads * config.head_dim
  return 2 * config.num_layers * num_tokens * heads * dtype_bytes


def pages_for(num_tokens: int, page_tokens: int) -> int:
  """Pages that hold `num_tokens` tokens: 17 tokens need 2 pages of 16."""
  return -(-num_tokens // page_tokens)


def weight_bytes(config: ModelConfig, dtype_bytes: int, tensor: int = 1) -> int:
  """Bytes of weights on one of an instance's `tensor` devices.

  Query heads, MLP and vocabulary are split over all devices, KV heads over
  as many as divide them; what does not divide, and the norms, is on each.
  """
  kv = math.gcd(tensor, config.num_kv_heads)
  mlp = tensor if config.mlp_dim % tensor == 0 else 1
  vocab = tensor if config.vocab_size % tensor == 0 else 1
  q_dim = config.num_heads * config.head_dim // tensor
  kv_dim = config.num_kv_heads * config.head_dim // kv
  layer = 2 * config.model_dim * (q_dim + kv_dim + 1)
  layer += 3 * config.model_dim * config.mlp_dim // mlp
  layer += (q_dim + 2 * kv_dim) * config.qkv_bias
  layer += 2 * config.head_dim * config.qk_norm
  tables = 1 if config.tie_embeddings else 2
  table = config.vocab_size * config.model_dim // vocab
  weights = config.num_layers * layer + tables * table + config.model_dim
  return weights * dtype_bytes


def device_peak_bytes(
  config: ModelConfig,
  *,
  num_pages: int,
  page_tokens: int,
  dtype_bytes: int,
  workspace_bytes: int = 0,
  transfer_bytes: int = 0,
  margin: float = 0.0,
  tensor: int = 1,
) -> int:
  """Bytes one device of an instance needs at its peak.

  Weights + KV pool + workspace + transfer buffers, and an allocator's margin
  on the whole. KV heads are replicated where devices outnumber them.

  Args:
    num_pages: of the device's pool, scratch page 0 included.
    dtype_bytes: of a weight and of a KVCache number.
    workspace_bytes: what a step allocates besides, see `memory_analysis`.
    margin: share of the sum the allocator loses, 0.1 is 10 %.
    tensor: devices of the instance.
  """
  for name, value in (('num_pages', num_pages), ('tensor', tensor)):
    if value < 1:
      raise ValueError(f'device_peak_bytes: {name}={value!r} must be >= 1')
  weights = weight_bytes(config, dtype_bytes, tensor)
  pool = kv_bytes(config, num_pages * page_tokens, dtype_bytes)
  pool //= math.gcd(tensor, config.num_kv_heads)
  total = weights + pool + workspace_bytes + transfer_bytes
  return math.ceil(total * (1 + margin))
