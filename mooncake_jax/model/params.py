# SPDX-License-Identifier: Apache-2.0
"""Parameters, declared once: shape, logical axes, initializer.

D model, F mlp, V vocab, K KV head, G query heads a KV head, H head dim.
Query head n of a checkpoint is (k, g) with n = k * G + g.

A tree is {'embed': VD, 'layers', 'final_norm': D, 'unembed': DV}; tied
embeddings have no 'unembed' (but see `materialize_unembed`). 'layers' is a
tuple of one dict a layer, which runs unrolled, or one dict of arrays stacked
on a first axis L, which runs as a scan: same numbers, other compile time. A
tree of some of the layers has the tables that these need only. `fuse.py` makes
the layout that serves of it.
"""

from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding

from mooncake_jax.model import sharding
from mooncake_jax.model_config import ModelConfig

Params = dict[str, Any]
Layers = tuple[dict[str, jax.Array], ...] | dict[str, jax.Array]

INIT_STDDEV = 0.02


class Declaration(NamedTuple):
  """One parameter.

  Attributes:
    axes: one letter a dimension, see the module.
    init: 'normal', 'ones' or 'zeros'.
  """

  axes: str
  init: str


TABLES = {
  'embed': Declaration('VD', 'normal'),
  'final_norm': Declaration('D', 'ones'),
  'unembed': Declaration('DV', 'normal'),
}
LAYER = {
  'attn_norm': Declaration('D', 'ones'),
  'wq': Declaration('DKGH', 'normal'),
  'wk': Declaration('DKH', 'normal'),
  'wv': Declaration('DKH', 'normal'),
  'wo': Declaration('KGHD', 'normal'),
  'mlp_norm': Declaration('D', 'ones'),
  'w_gate': Declaration('DF', 'normal'),
  'w_up': Declaration('DF', 'normal'),
  'w_down': Declaration('FD', 'normal'),
}
QKV_BIAS = {
  'bq': Declaration('KGH', 'zeros'),
  'bk': Declaration('KH', 'zeros'),
  'bv': Declaration('KH', 'zeros'),
}
# Of a model whose KVCache is int8 or float8 (`quantize.py`).
KV_SCALES = {
  'k_scale': Declaration('KH', 'ones'),
  'v_scale': Declaration('KH', 'ones'),
}
QK_NORM = {
  'q_norm': Declaration('H', 'ones'),
  'k_norm': Declaration('H', 'ones'),
}


def declarations(config: ModelConfig) -> Params:
  """Returns the tree of declarations, layers as a tuple."""
  layer = dict(LAYER)
  if config.qkv_bias:
    layer.update(QKV_BIAS)
  if config.qk_norm:
    layer.update(QK_NORM)
  tree: Params = {name: TABLES[name] for name in ('embed', 'final_norm')}
  if not config.tie_embeddings:
    tree['unembed'] = TABLES['unembed']
  return {**tree, 'layers': (layer,) * config.num_layers}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
  """Returns the size of each logical axis."""
  return {
    'V': config.vocab_size,
    'D': config.model_dim,
    'F': config.mlp_dim,
    'K': config.num_kv_heads,
    'G': config.num_groups,
    'H': config.head_dim,
  }


def param_shape(config: ModelConfig, declared: Declaration) -> tuple[int, ...]:
  """Returns a parameter's shape."""
  sizes = axis_sizes(config)
  return tuple(sizes[axis] for axis in declared.axes)


def _map(f, config: ModelConfig):
  is_leaf = lambda x: isinstance(x, Declaration)  # noqa: E731
  return jax.tree.map(f, declarations(config), is_leaf=is_leaf)


def abstract_params(
  config: ModelConfig,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
) -> Params:
  """Returns the tree of `ShapeDtypeStruct`, with shardings if on a mesh."""

  def abstract(declared: Declaration) -> jax.ShapeDtypeStruct:
    shape = param_shape(config, declared)
    placed = _sharding(config, mesh, declared) if mesh else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

  return _map(abstract, config)


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
  """Returns the tree of shardings on an instance's mesh."""
  return _map(lambda declared: _sharding(config, mesh, declared), config)


def _sharding(
  config: ModelConfig, mesh: Mesh, declared: Declaration
) -> NamedSharding:
  shape = param_shape(config, declared)
  return sharding.named_sharding(mesh, declared.axes, shape)


def init_params(
  config: ModelConfig,
  key: jax.Array,
  dtype: jax.typing.DTypeLike = jnp.float32,
  mesh: Mesh | None = None,
) -> Params:
  """Returns random parameters; the same for any mesh, rounded to `dtype`."""

  def init(declared: Declaration, key: jax.Array) -> jax.Array:
    shape = param_shape(config, declared)
    place = _sharding(config, mesh, declared) if mesh else None
    return jax.device_put(_init(declared.init, key, shape, dtype), place)

  tree = declarations(config)
  leaves, treedef = jax.tree.flatten(
    tree, is_leaf=lambda x: isinstance(x, Declaration)
  )
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(treedef, map(init, leaves, keys))


def _init(kind: str, key: jax.Array, shape, dtype) -> jax.Array:
  if kind == 'normal':
    # The same numbers as of the shape itself, whose program takes a CPU a
    # second to compile.
    flat = jax.random.normal(key, (math.prod(shape),), jnp.float32)
    return (INIT_STDDEV * flat.reshape(shape)).astype(dtype)
  return jnp.ones(shape, dtype) if kind == 'ones' else jnp.zeros(shape, dtype)


def stack_layers(params: Params) -> Params:
  """Returns the tree with its layers stacked; unchanged if they are."""
  return take_stacked(dict(params))


def take_stacked(params: Params) -> Params:
  """As `stack_layers`, but takes the tree over: its layers are gone from it.

  Each name's arrays are freed once they are stacked, where nobody else has
  them: this takes no more memory than the tree and its largest name.
  """
  layers = params.pop('layers')
  if not isinstance(layers, dict):
    left = [dict(layer) for layer in layers]
    del layers
    layers = {
      name: _stacked([a.pop(name) for a in left]) for name in [*left[0]]
    }
  return {**params, 'layers': layers}


def _stacked(arrays: Sequence[Any]) -> Any:
  return jax.tree.map(lambda *a: jnp.stack(a), *arrays)


def unstack_layers(params: Params) -> Params:
  """Returns the tree with one dict a layer; unchanged if it has them."""
  layers = params['layers']
  if not isinstance(layers, dict):
    return params
  num_layers = len(layers['attn_norm'])
  unstacked = tuple(layer_of(layers, i) for i in range(num_layers))
  return {**params, 'layers': unstacked}


def layer_of(layers: Layers, i: int) -> dict[str, jax.Array]:
  """Returns layer `i` of either layout."""
  if isinstance(layers, dict):
    return jax.tree.map(lambda a: a[i], layers)
  return layers[i]


def count_layers(layers: Layers) -> int:
  """Returns how many layers there are in either layout."""
  return len(layers['attn_norm'] if isinstance(layers, dict) else layers)


def slice_layers(layers: Layers, start: int, stop: int) -> Layers:
  """Returns layers [start, stop), those of one stage, in the same layout."""
  if (start, stop) == (0, count_layers(layers)):
    return layers
  if isinstance(layers, dict):
    return jax.tree.map(lambda a: a[start:stop], layers)
  return layers[start:stop]


def layers_params(
  params: Params, start: int, stop: int, tables: bool | None = None
) -> Params:
  """Returns a tree of layers [start, stop) and the tables that they use.

  Only stacked layers are copied, and of NumPy's arrays not even those.

  Args:
    tables: take all tables, or none, instead.
  """
  layers = params['layers']
  is_first, is_last = start == 0, stop == count_layers(layers)
  if tables is not None:
    is_first = is_last = tables
  names = {'embed'} if is_first else set()
  if is_last:
    names |= {'final_norm', 'unembed' if 'unembed' in params else 'embed'}
  tree: Params = {name: params[name] for name in sorted(names)}
  return {**tree, 'layers': slice_layers(layers, start, stop)}


def join_params(trees: Sequence[Params]) -> Params:
  """Returns one tree of all the layers of consecutive ones, copying none."""
  if len(trees) == 1:
    return trees[0]
  parts = [tree['layers'] for tree in trees]
  layers = [part if isinstance(part, tuple) else (part,) for part in parts]
  return {**trees[0], **trees[-1], 'layers': sum(layers, ())}


def materialize_unembed(params: Params) -> Params:
  """Gives tied embeddings their own [D, V] copy.

  Costs V * D weights. For platforms that are slow at x @ W[out, in]; on the
  CPUs measured here both layouts took the same time.
  """
  if 'unembed' in params:
    return params
  return {**params, 'unembed': params['embed'].T}
