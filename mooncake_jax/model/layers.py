# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer but attention.

B batch, T query token, K KV head, G query heads a KV head, H head dim,
D model, F mlp.
"""

import jax
from jax import numpy as jnp

from mooncake_jax.model import rope
from mooncake_jax.model import sharding
from mooncake_jax.model_config import ModelConfig

Layer = dict[str, jax.Array]


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns q [B, T, K, G, H], k and v [B, T, K, H], position encoded."""
  q_BTKGH, k_BTKH, v_BTKH = _project(layer, config, x_BTD)
  if config.qk_norm:
    q_BTKGH = rms_norm(q_BTKGH, layer['q_norm'], config.norm_eps)
    k_BTKH = rms_norm(k_BTKH, layer['k_norm'], config.norm_eps)
  return rope.rotate(q_BTKGH, angles), rope.rotate(k_BTKH, angles), v_BTKH


def _project(layer, config, x_BTD):
  """q, k and v by one product where they are fused (`fuse.py`)."""
  if 'wqkv' in layer:
    qkv_BTKMH = jnp.einsum('BTD,DKMH->BTKMH', x_BTD, layer['wqkv'])
    if config.qkv_bias:
      qkv_BTKMH += layer['bqkv'][None, None]
    return qkv_BTKMH[..., :-2, :], qkv_BTKMH[..., -2, :], qkv_BTKMH[..., -1, :]
  q_BTKGH = jnp.einsum('BTD,DKGH->BTKGH', x_BTD, layer['wq'])
  k_BTKH = jnp.einsum('BTD,DKH->BTKH', x_BTD, layer['wk'])
  v_BTKH = jnp.einsum('BTD,DKH->BTKH', x_BTD, layer['wv'])
  if config.qkv_bias:
    q_BTKGH += layer['bq'][None, None]
    k_BTKH += layer['bk'][None, None]
    v_BTKH += layer['bv'][None, None]
  return q_BTKGH, k_BTKH, v_BTKH


def attention_output(layer: Layer, o_BTKGH: jax.Array) -> jax.Array:
  """Sums the heads' outputs over all devices: [B, T, D]."""
  wo_KGHD = layer['wo']
  # Not an einsum: it reorders the summed axes, which copies the weights.
  return jnp.tensordot(
    o_BTKGH, wo_KGHD, 3, out_sharding=sharding.replicated(wo_KGHD)
  )


def mlp(layer: Layer, x_BTD: jax.Array) -> jax.Array:
  """Gated MLP, silu(x Wg) * (x Wu) Wd: [B, T, D]."""
  if 'w_gate_up' in layer:
    both_BT2F = jnp.einsum('BTD,DXF->BTXF', x_BTD, layer['w_gate_up'])
    gate_BTF, up_BTF = both_BT2F[:, :, 0], both_BT2F[:, :, 1]
  else:
    gate_BTF = jnp.einsum('BTD,DF->BTF', x_BTD, layer['w_gate'])
    up_BTF = jnp.einsum('BTD,DF->BTF', x_BTD, layer['w_up'])
  hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
  down = layer['w_down']
  return jnp.einsum(
    'BTF,FD->BTD', hidden_BTF, down, out_sharding=sharding.replicated(down)
  )
