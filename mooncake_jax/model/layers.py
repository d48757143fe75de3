# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer but attention.

B batch, T query token, K KV head, G query heads a KV head, H head dim,
D model, F mlp.
"""

from typing import Any

import jax
from jax import numpy as jnp

from mooncake_jax.model import rope
from mooncake_jax.model import sharding
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.products import product
from mooncake_jax.model_config import ModelConfig

Layer = dict[str, Any]  # arrays; `products.Weight` of MATRICES
MATRICES = ('wqkv', 'wq', 'wk', 'wv', 'wo')
MATRICES += ('w_gate_up', 'w_gate', 'w_up', 'w_down')


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """Normalises the last axis to unit mean square, in float32."""
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  weight = jnp.expand_dims(weight, tuple(range(x.ndim - 1)))
  return (wide * scale).astype(x.dtype) * weight


def qkv(
  layer: Layer,
  config: ModelConfig,
  x_BTD: jax.Array,
  angles: tuple[jax.Array, jax.Array],
  kernel: AttentionKernel = 'jnp',
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns q [B, T, K, G, H], k and v [B, T, K, H], position encoded."""
  q_BTKGH, k_BTKH, v_BTKH = _project(layer, config, x_BTD, kernel)
  if config.qk_norm:
    q_BTKGH = rms_norm(q_BTKGH, layer['q_norm'], config.norm_eps)
    k_BTKH = rms_norm(k_BTKH, layer['k_norm'], config.norm_eps)
  return rope.rotate(q_BTKGH, angles), rope.rotate(k_BTKH, angles), v_BTKH


def _project(layer, config, x_BTD, kernel):
  """q, k and v by one product where they are fused (`fuse.py`)."""
  if 'wqkv' in layer:
    qkv_BTKMH = product(x_BTD, layer['wqkv'], kernel=kernel)
    if config.qkv_bias:
      qkv_BTKMH += layer['bqkv'][None, None]
    return qkv_BTKMH[..., :-2, :], qkv_BTKMH[..., -2, :], qkv_BTKMH[..., -1, :]
  q_BTKGH = product(x_BTD, layer['wq'], kernel=kernel)
  k_BTKH = product(x_BTD, layer['wk'], kernel=kernel)
  v_BTKH = product(x_BTD, layer['wv'], kernel=kernel)
  if config.qkv_bias:
    q_BTKGH += layer['bq'][None, None]
    k_BTKH += layer['bk'][None, None]
    v_BTKH += layer['bv'][None, None]
  return q_BTKGH, k_BTKH, v_BTKH


def attention_output(
  layer: Layer, o_BTKGH: jax.Array, kernel: AttentionKernel = 'jnp'
) -> jax.Array:
  """Sums the heads' outputs over all devices: [B, T, D]."""
  wo_KGHD = layer['wo']
  return product(o_BTKGH, wo_KGHD, 3, kernel, sharding.replicated(o_BTKGH))


def mlp(
  layer: Layer, x_BTD: jax.Array, kernel: AttentionKernel = 'jnp'
) -> jax.Array:
  """Gated MLP, silu(x Wg) * (x Wu) Wd: [B, T, D]."""
  if 'w_gate_up' in layer:
    both_BT2F = product(x_BTD, layer['w_gate_up'], kernel=kernel)
    gate_BTF, up_BTF = both_BT2F[:, :, 0], both_BT2F[:, :, 1]
  else:
    gate_BTF = product(x_BTD, layer['w_gate'], kernel=kernel)
    up_BTF = product(x_BTD, layer['w_up'], kernel=kernel)
  hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
  whole = sharding.replicated(x_BTD)
  return product(hidden_BTF, layer['w_down'], 1, kernel, whole)
