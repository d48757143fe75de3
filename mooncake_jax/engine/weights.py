# SPDX-License-Identifier: Apache-2.0
"""Where instances get their parameters from."""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from mooncake_jax.model import params as model_params
from mooncake_jax.model import sharding
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

# A tree to be copied onto the mesh, or what loads it there, slice by slice.
ParamsSource = Params | Callable[[jax.sharding.Mesh], Params]


class Weights:
  """One model's parameters for all instances of a backend.

  CPU devices use a tree that lies on the CPU in place: instances of one
  layout of layers share its memory.
  """

  def __init__(self, source: ParamsSource, config: ModelConfig):
    self._source = source
    self._config = config
    self._trees: dict[bool, Params] = {}

  def on(
    self,
    mesh: jax.sharding.Mesh,
    unroll: bool,
    groups: Sequence[tuple[int, int]],
    tables: bool | None = None,
  ) -> list[Params]:
    """A tree for each layer group, on a mesh, layers as a tuple or stacked.

    Args:
      tables: whether each has all tables or none; None is those it uses.
    """
    cut = partial(model_params.layers_params, tables=tables)
    if callable(self._source):
      placed = self._source(mesh)
      with jax.set_mesh(mesh):
        arranged = _arrange(placed, unroll)
        return [cut(arranged, *group) for group in groups]
    trees = [cut(self._tree(unroll), *group) for group in groups]
    shardings = self._shardings(mesh, unroll)
    return [jax.device_put(tree, _like(tree, shardings)) for tree in trees]

  def _tree(self, unroll: bool) -> Params:
    if unroll not in self._trees:
      assert not callable(self._source)
      arranged = _arrange(self._source, unroll)
      self._trees[unroll] = jax.tree.map(_host_view, arranged)
    return self._trees[unroll]

  def _shardings(self, mesh: jax.sharding.Mesh, unroll: bool) -> Params:
    """Shardings of the tree as it is; an extra 'unembed' has one too."""
    shardings = model_params.param_shardings(self._config, mesh)
    tree = self._tree(unroll)
    if 'unembed' in tree and 'unembed' not in shardings:
      shape = tree['unembed'].shape
      shardings['unembed'] = sharding.named_sharding(mesh, 'DV', shape)
    if not unroll:
      shardings['layers'] = _stacked(shardings['layers'][0])
    return shardings


def _like(tree: Params, shardings: Params) -> Params:
  """The shardings of a tree of some of the layers."""
  layers = shardings['layers']
  if isinstance(layers, tuple):
    layers = layers[: len(tree['layers'])]  # all layers have the same
  return {name: shardings[name] for name in tree} | {'layers': layers}


def _arrange(params: Params, unroll: bool) -> Params:
  if unroll:
    return model_params.unstack_layers(params)
  return model_params.stack_layers(params)


def _stacked(layer: dict[str, jax.sharding.NamedSharding]):
  """Shardings of stacked layers: the layer axis is not split."""
  return jax.tree.map(
    lambda s: jax.sharding.NamedSharding(
      s.mesh, jax.sharding.PartitionSpec(None, *s.spec)
    ),
    layer,
  )


def _host_view(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  """A CPU array as NumPy, without a copy: a CPU device uses it in place."""
  if isinstance(array, np.ndarray):
    return array
  on_one_cpu = len(devices := array.devices()) == 1 and all(
    device.platform == 'cpu' for device in devices
  )
  return np.asarray(array) if on_one_cpu else array
