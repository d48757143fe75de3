# SPDX-License-Identifier: Apache-2.0
"""Parameters as they run: fewer products a layer, and fewer arrays a call.

A checkpoint's projections that read the same input become one array: queries,
keys and values 'wqkv', the MLP's two first ones 'w_gate_up'. Both layouts give
the same numbers and go through the same steps; this one is for serving, the
other for checkpoints and whatever looks at single projections.

D model, F mlp, K KV head, G query heads a KV head, H head dim, M = G + 2: the
query heads of a KV head, its key and its value.
"""

from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding

from mooncake_jax.model import params as params_lib
from mooncake_jax.model import sharding
from mooncake_jax.model.params import Declaration
from mooncake_jax.model.params import Params

FUSED = {
  'wqkv': Declaration('DKMH', 'normal'),
  'bqkv': Declaration('KMH', 'zeros'),
  'w_gate_up': Declaration('D2F', 'normal'),
}
_DECLARED = params_lib.TABLES | params_lib.LAYER | params_lib.QKV_BIAS
_DECLARED = _DECLARED | params_lib.QK_NORM | params_lib.KV_SCALES | FUSED
_AXES = {name: declared.axes for name, declared in _DECLARED.items()}
_HEADS = {'wqkv': ('wq', 'wk', 'wv'), 'bqkv': ('bq', 'bk', 'bv')}
_NEW_AXIS = -2  # of what has one head or one of two matrices


def fuse(params: Params, heads: bool = True) -> Params:
  """Returns the tree with its layers' projections fused.

  Takes the tree over: its layers are gone from it, each array is freed once
  it is copied. What is fused already stays.

  Args:
    heads: whether queries, keys and values are fused too. Where a KV head is
      replicated over query groups they lie on different devices.
  """
  layers = params.pop('layers')
  if isinstance(layers, dict):
    return {**params, 'layers': _fuse_layer(dict(layers), heads)}
  left, done = list(layers), []
  del layers
  while left:
    done.append(_fuse_layer(dict(left.pop(0)), heads))
  return {**params, 'layers': tuple(done)}


def shardings(params: Params, mesh: Mesh) -> Params:
  """The shardings of a tree's arrays on a mesh, in either layout."""

  def placed(name: str, leaf: Any) -> Any:
    axes = _AXES[name]
    return jax.tree.map(
      lambda a: sharding.stacked_sharding(mesh, axes, a.shape), leaf
    )

  def of(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: placed(name, leaf) for name, leaf in arrays.items()}

  layers = params['layers']
  tables = {name: leaf for name, leaf in params.items() if name != 'layers'}
  if isinstance(layers, dict):
    return {**of(tables), 'layers': of(layers)}
  return {**of(tables), 'layers': tuple(map(of, layers))}


def _fuse_layer(layer: dict[str, Any], heads: bool) -> dict[str, Any]:
  """Of one layer, or of stacked ones: axes are counted from the end."""
  for name, parts in _HEADS.items():
    if heads and parts[0] in layer:
      q, k, v = (layer.pop(part) for part in parts)
      layer[name] = _concatenate(name, q, *map(_one, (k, v)))
  if 'w_gate' in layer:
    gate_up = (layer.pop(name) for name in ('w_gate', 'w_up'))
    layer['w_gate_up'] = _concatenate('w_gate_up', *map(_one, gate_up))
  return layer


def _one(weight: Any) -> Any:
  return jax.tree.map(lambda a: jnp.expand_dims(a, _NEW_AXIS), weight)


def _concatenate(name: str, *parts: Any) -> Any:
  """Behind each other on the new axis; int8 values and scales alike."""

  def join(*arrays: jax.Array) -> jax.Array:
    joined = jnp.concatenate(arrays, _NEW_AXIS)
    return jax.device_put(joined, _sharding(name, joined))

  return jax.tree.map(join, *parts)


def _sharding(name: str, array: jax.Array) -> NamedSharding | None:
  """Of an array that lies on a mesh."""
  mesh = getattr(array.sharding, 'mesh', None)
  if mesh is None or mesh.empty:
    return None
  return sharding.stacked_sharding(mesh, FUSED[name].axes, array.shape)
