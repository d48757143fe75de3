# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a file to parameters on a mesh, slice by slice."""

from collections.abc import Iterable
from collections.abc import Iterator
import itertools
import math
from typing import Protocol

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
import numpy as np

from mooncake_jax.model import params
from mooncake_jax.model.checkpoints import names
from mooncake_jax.model.checkpoints.names import Stored
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig

Index = tuple[slice, ...]


class TensorSource(Protocol):
  """Tensors under Hugging Face names. `path` is what errors name."""

  path: str

  def names(self) -> Iterable[str]:
    """All tensors there are."""
    ...

  def shape(self, name: str) -> tuple[int, ...]:
    """Shape of one of them."""
    ...

  def read(self, name: str, index: Index) -> np.ndarray:
    """`tensor[index]` in a fresh array; a bounded slice per dimension."""
    ...


def load(
  source: TensorSource,
  config: ModelConfig,
  mesh: Mesh | None = None,
  dtype: jax.typing.DTypeLike = np.float32,
) -> Params:
  """Reads the parameters, layers as a tuple; each device its slice only.

  Args:
    mesh: an instance's mesh; None puts all on the default device.
    dtype: of every parameter, whatever the file's is.

  Raises:
    ValueError: a tensor is missing, of another shape, or belongs to no
      parameter of this config; names the file and the tensor.
  """
  check(source, config)
  tree = names.stored_tree(config)
  abstract = abstract_params(config, mesh, dtype)
  return jax.tree.map(
    lambda stored, like: _place(source, stored, like),
    tree,
    abstract,
    is_leaf=lambda x: isinstance(x, Stored),
  )


def check(source: TensorSource, config: ModelConfig) -> None:
  """Raises what `load` documents, without reading a tensor."""
  found = set(source.names())
  if config.num_layers > len(found):  # before a tree of that many is built
    raise ValueError(
      f'{source.path}: {len(found)} tensors are too few for '
      f'num_layers={config.num_layers}'
    )
  for stored in names.all_stored(config):
    if stored.name not in found:
      raise ValueError(f'{source.path}: tensor {stored.name!r} is missing')
    shape = tuple(source.shape(stored.name))
    if shape != stored.shape:
      raise ValueError(
        f'{source.path}: tensor {stored.name!r} has {shape=}, the config asks '
        f'for {stored.shape}'
      )
    found.remove(stored.name)
  for name in sorted(found):
    if not _is_idle(name, config):
      raise ValueError(
        f'{source.path}: tensor {name!r} belongs to no parameter of this '
        f'{config.family!r} config'
      )


def _is_idle(name: str, config: ModelConfig) -> bool:
  """Tensors that old files carry though they follow from the others."""
  if name == 'lm_head.weight':
    return config.tie_embeddings
  return name.endswith('rotary_emb.inv_freq')


def abstract_params(
  config: ModelConfig, mesh: Mesh | None, dtype: jax.typing.DTypeLike
) -> Params:
  """Shapes and shardings to load; without a mesh, on the default device."""
  default = jnp.zeros(()).sharding
  return jax.tree.map(
    lambda like: like.update(sharding=like.sharding or default),
    params.abstract_params(config, dtype, mesh),
  )


def _place(
  source: TensorSource, stored: Stored, like: jax.ShapeDtypeStruct
) -> jax.Array:
  def read(index: Index | None) -> np.ndarray:
    # On CPU the device takes this fresh array over without a copy.
    assert index is not None
    part = read_part(source, stored, index)
    return np.ascontiguousarray(part, like.dtype)

  assert like.sharding is not None
  return jax.make_array_from_callback(
    like.shape, like.sharding, read, like.dtype
  )


def read_part(source: TensorSource, stored: Stored, index: Index) -> np.ndarray:
  """`parameter[index]` in our axes, in the file's dtype.

  Only the stored rows and columns that `index` touches are read.
  """
  wanted = [index[axis] for axis in stored.inverse]
  slices = [slice(*s.indices(n)) for s, n in zip(wanted, stored.split_shape)]
  runs, taken = [], iter(slices)
  for group in stored.groups:
    inner = list(itertools.islice(taken, len(group)))
    runs.append([slice(a, b) for a, b in contiguous(group, inner)])
  part = _read_runs(source, stored.name, runs)
  sizes = [s.stop - s.start for s in slices]
  return part.reshape(sizes).transpose(stored.order)


def contiguous(
  sizes: tuple[int, ...], slices: list[slice]
) -> Iterator[tuple[int, int]]:
  """Half-open ranges of a merged dimension that a product of slices is.

  For sizes (K, G, H) = (2, 4, 8) and slices [0:2, 0:2, 0:8]: (0, 16) and
  (32, 48), the first two query heads of each KV head.
  """
  inner = math.prod(sizes[1:])
  whole = all(s == slice(0, n, 1) for s, n in zip(slices[1:], sizes[1:]))
  if whole:
    yield slices[0].start * inner, slices[0].stop * inner
    return
  for i in range(slices[0].start, slices[0].stop):
    for start, stop in contiguous(sizes[1:], slices[1:]):
      yield i * inner + start, i * inner + stop


def _read_runs(
  source: TensorSource, name: str, runs: list[list[slice]]
) -> np.ndarray:
  parts = [source.read(name, index) for index in itertools.product(*runs)]
  if len(parts) == 1:
    return parts[0]
  # Only one dimension of a matrix is ever cut into several runs.
  axis = next(i for i, several in enumerate(runs) if len(several) > 1)
  return np.concatenate(parts, axis)
