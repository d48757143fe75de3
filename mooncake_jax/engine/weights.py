# SPDX-License-Identifier: Apache-2.0
"""Where instances get their parameters from."""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from mooncake_jax.model import fuse
from mooncake_jax.model import params as model_params
from mooncake_jax.model.huge_pages import on_huge_pages
from mooncake_jax.model.params import Params

# A tree to be copied onto the mesh, or what loads it there, slice by slice.
ParamsSource = Params | Callable[[jax.sharding.Mesh], Params]


class Weights:
  """One model's parameters for all instances of a backend.

  Projections are fused for all. CPU devices use a tree that lies on the CPU in
  place: instances of one layout of layers share its memory.
  """

  def __init__(self, source: ParamsSource):
    self._source = source
    self._trees: dict[tuple[bool, bool], Params] = {}

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
    # Where a KV head has copies, queries lie on other devices than it does.
    heads = mesh.shape['group'] == 1
    if callable(self._source):
      params = dict(self._source(mesh))  # which may keep what it gives
      with jax.set_mesh(mesh):
        params = _arranged(params, unroll)  # so nothing holds the other layout
        params = fuse.fuse(params, heads)
        return on_huge_pages([cut(params, *group) for group in groups])
    trees = [cut(self._tree(unroll, heads), *group) for group in groups]
    return on_huge_pages(
      [jax.device_put(tree, fuse.shardings(tree, mesh)) for tree in trees]
    )

  def _tree(self, unroll: bool, heads: bool) -> Params:
    if (unroll, heads) not in self._trees:
      assert not callable(self._source)
      fused = fuse.fuse(_arranged(dict(self._source), unroll), heads)
      self._trees[unroll, heads] = jax.tree.map(_host_view, fused)
    return self._trees[unroll, heads]


def _arranged(params: Params, unroll: bool) -> Params:
  """Takes the tree over, but not the layers of one that others have too."""
  change = model_params.unstack_layers if unroll else model_params.take_stacked
  return dict(change(params))


def _host_view(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
  """A CPU array as NumPy, without a copy: a CPU device uses it in place."""
  if isinstance(array, np.ndarray):
    return array
  on_one_cpu = len(devices := array.devices()) == 1 and all(
    device.platform == 'cpu' for device in devices
  )
  return np.asarray(array) if on_one_cpu else array
