# SPDX-License-Identifier: Apache-2.0
"""int8 weights, and KVCache in int8 or float8 with a scale a channel.

A weight matrix becomes int8 with a scale for each of its outputs. Keys and
values are divided by fixed scales, measured once on some tokens (`kv_scales`),
so that a block's bytes mean the same on every instance of the model; nothing
of attention changes, for key scales go into the queries and value scales into
the output. What such a model computes is another model's KVCache: its block
identity names the dtype.

L layer, P page, C token in a page, K KV head, H head dim.
"""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model import sharding
from mooncake_jax.model.params import LAYER
from mooncake_jax.model.params import layer_of
from mooncake_jax.model.params import Params

# Axes that a product sums over; scales are of the others.
_INPUTS = {
  'wq': 'D',
  'wk': 'D',
  'wv': 'D',
  'wo': 'KGH',
  'w_gate': 'D',
  'w_up': 'D',
  'w_down': 'F',
}
# A key or value may be so much larger than any that was measured.
HEADROOM = 1.25


@flax.struct.dataclass
class Quantized:
  """A weight: `values` int8 times `scale`, which has ones for summed axes."""

  values: jax.Array
  scale: jax.Array


def quantize_weights(params: Params) -> Params:
  """Returns the tree with the layers' matrices in int8; the rest stays."""
  layers = params['layers']
  if isinstance(layers, dict):
    return {**params, 'layers': _quantize_layer(layers)}
  return {**params, 'layers': tuple(map(_quantize_layer, layers))}


def _quantize_layer(layer: dict[str, Any]) -> dict[str, Any]:
  """Of one layer, or of stacked ones: axes are counted from the end."""
  found = dict(layer)
  for name, inputs in _INPUTS.items():
    axes = LAYER[name].axes
    summed = tuple(axes.index(a) - len(axes) for a in inputs)
    weight = layer[name]
    highest = jnp.max(jnp.abs(weight), axis=summed, keepdims=True)
    scale = jnp.where(highest > 0, highest, 1) / 127
    values = jnp.round(weight / scale).astype(jnp.int8)
    found[name] = Quantized(values, scale)
  return found


def dense_weight(weight: Any) -> jax.Array:
  """Returns a plain weight, of one that may be `Quantized`."""
  if not isinstance(weight, Quantized):
    return weight
  return weight.values.astype(weight.scale.dtype) * weight.scale


def kv_scales(
  params: Params, kv_LP2CKH: jax.Array, dtype: jax.typing.DTypeLike
) -> Params:
  """Returns the tree with scales for KVCache in `dtype`.

  Args:
    kv_LP2CKH: a float pool in which the model has computed some tokens.
  """
  return scaled(params, measured_scales(kv_LP2CKH, dtype))


def measured_scales(
  kv_LP2CKH: jax.Array, dtype: jax.typing.DTypeLike
) -> dict[str, jax.Array]:
  """Scales [L, K, H] of keys and of values, see `kv_scales`."""
  highest = jnp.max(jnp.abs(kv_LP2CKH), axis=(1, 3)).astype(jnp.float32)
  scale_L2KH = jnp.where(highest > 0, highest, 1) * HEADROOM / largest(dtype)
  return {'k_scale': scale_L2KH[:, 0], 'v_scale': scale_L2KH[:, 1]}


def scaled(
  params: Params,
  scales: Mapping[str, jax.Array | np.ndarray],
  mesh: jax.sharding.Mesh | None = None,
) -> Params:
  """Returns the tree with measured scales, put onto its mesh."""
  stacked: dict[str, Any] = dict(scales)
  if mesh is not None:
    for name, scale_LKH in scales.items():
      place = sharding.named_sharding(mesh, 'LKH', scale_LKH.shape)
      stacked[name] = jax.device_put(scale_LKH, place)
  layers = params['layers']
  if isinstance(layers, dict):
    return {**params, 'layers': {**layers, **stacked}}
  each = ({**layer, **layer_of(stacked, i)} for i, layer in enumerate(layers))
  return {**params, 'layers': tuple(each)}


def largest(dtype: jax.typing.DTypeLike) -> float:
  """The largest number of a dtype of the KVCache."""
  if jnp.issubdtype(dtype, jnp.integer):
    return float(jnp.iinfo(dtype).max)
  return float(jnp.finfo(dtype).max)


def shrink(layer: dict[str, Any], kv_BT2KH: jax.Array, dtype) -> jax.Array:
  """Keys and values as the pool holds them."""
  if 'k_scale' not in layer:
    return kv_BT2KH.astype(dtype)
  scale_2KH = jnp.stack([layer['k_scale'], layer['v_scale']])
  scaled = kv_BT2KH.astype(jnp.float32) / scale_2KH[None, None]
  limit = largest(dtype)
  if jnp.issubdtype(dtype, jnp.integer):
    scaled = jnp.round(scaled)
  return jnp.clip(scaled, -limit, limit).astype(dtype)


def widen_query(layer: dict[str, Any], q_BTKGH: jax.Array) -> jax.Array:
  """Queries for keys that were divided by their scales."""
  if 'k_scale' not in layer:
    return q_BTKGH
  scale = layer['k_scale'][None, None, :, None]
  return (q_BTKGH * scale).astype(q_BTKGH.dtype)


def widen_output(layer: dict[str, Any], o_BTKGH: jax.Array) -> jax.Array:
  """The output of values that were divided by their scales."""
  if 'v_scale' not in layer:
    return o_BTKGH
  scale = layer['v_scale'][None, None, :, None]
  return (o_BTKGH * scale).astype(o_BTKGH.dtype)
