# SPDX-License-Identifier: Apache-2.0
"""Parameter trees of flax modules, in and out.

The modules are named as in Hugging Face checkpoints: `model.embed_tokens`,
`model.layers`, in a layer `self_attn.{q,k,v,o}_proj`, `mlp.{gate,up,down}_proj`
and the norms, then `model.norm` and `lm_head`. Layer 3 is `layers_3` in linen
(a list in `setup`) and entry 3 of an `nnx.List`. Leaves are named as flax's
own modules name them:

  Linear, Dense  kernel [in, out] and bias [out], heads merged in in or out
  Embed          embedding [V, D]
  RMSNorm        scale

with heads in the checkpoint's order, n = k * G + g.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
from jax import numpy as jnp
from jax.sharding import Mesh
import numpy as np

from mooncake_jax.model.checkpoints import names
from mooncake_jax.model.checkpoints import source
from mooncake_jax.model.checkpoints.names import Stored
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

_WEIGHTS = ('kernel', 'embedding', 'scale')


def from_flax(
  tree: nnx.State | Mapping[str, Any],
  config: ModelConfig,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = np.float32,
) -> Params:
  """Takes over a linen dict of parameters or an `nnx.State`.

  Args:
    tree: `module.init(...)` with or without its 'params' level, or
      `nnx.state(module, nnx.Param)`.
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter, whatever the tree's is.

  Returns:
    The tree of `params.py`, layers as a tuple.

  Raises:
    ValueError: a parameter is missing, of another shape or of no use to this
      config; names it as a checkpoint would.
  """
  return source.load(_FlaxTree(tree), config, mesh, dtype)


def to_linen(params: Params, config: ModelConfig) -> dict[str, Any]:
  """The parameters as a linen module's dict, below its 'params' level."""
  tree: dict[str, Any] = {}
  for path, value in _leaves(params, config):
    *folders, leaf = _linen_path(path)
    place = tree
    for folder in folders:
      place = place.setdefault(folder, {})
    place[leaf] = value
  return tree


def to_nnx(params: Params, config: ModelConfig) -> nnx.State:
  """The parameters as a state for `nnx.update(module, state)`."""
  leaves = _leaves(params, config)
  flat: Any = {path: nnx.Param(value) for path, value in leaves}
  return nnx.from_flat_state(flat)


class _FlaxTree:
  """A flax tree as a source of tensors under checkpoint names."""

  def __init__(self, tree: nnx.State | Mapping[str, Any]):
    self.path = 'nnx.State' if isinstance(tree, nnx.State) else 'linen params'
    if isinstance(tree, nnx.State):
      tree = nnx.to_pure_dict(tree)
    tree = tree['params'] if set(tree) == {'params'} else tree
    self._leaves = dict(_flatten(tree))

  def names(self) -> Iterator[str]:
    return iter(self._leaves)

  def shape(self, name: str) -> tuple[int, ...]:
    leaf, value = self._leaves[name]
    return value.shape[::-1] if leaf == 'kernel' else value.shape

  def read(self, name: str, index: source.Index) -> np.ndarray:
    leaf, value = self._leaves[name]
    value = np.asarray(value)
    return np.array((value.T if leaf == 'kernel' else value)[index])


def _flatten(
  tree: Mapping[Any, Any], prefix: str = ''
) -> Iterator[tuple[str, tuple[str, Any]]]:
  """(checkpoint name, (leaf name, array)) of every leaf."""
  for key, value in tree.items():
    if isinstance(value, Mapping):
      folder = str(key).replace('layers_', 'layers.')
      yield from _flatten(value, f'{prefix}{folder}.')
    else:
      kind = 'weight' if key in _WEIGHTS else key
      yield f'{prefix}{kind}', (str(key), value)


def _leaves(
  params: Params, config: ModelConfig
) -> Iterator[tuple[tuple[str | int, ...], jax.Array]]:
  """(nnx path, array) of every parameter."""
  for stored, tensor in names.tensors(params, config):
    *folders, kind = stored.name.split('.')
    leaf = _leaf_name(stored, kind)
    path = [int(f) if f.isdigit() else f for f in folders]
    value = tensor.T if leaf == 'kernel' else tensor
    yield (*path, leaf), jnp.asarray(value)


def _leaf_name(stored: Stored, kind: str) -> str:
  if kind != 'weight':
    return kind
  if 'norm' in stored.name:
    return 'scale'
  return 'embedding' if 'embed' in stored.name else 'kernel'


def _linen_path(path: tuple[str | int, ...]) -> list[str]:
  """('model', 'layers', 0, ...) to ['model', 'layers_0', ...]."""
  joined = '/'.join(str(part) for part in path)
  return joined.replace('layers/', 'layers_').split('/')
