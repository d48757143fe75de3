# SPDX-License-Identifier: Apache-2.0
"""Which logical axis of an array lies on which axes of the mesh.

An instance's mesh has two explicit axes: KV heads K are split over 'kv',
query groups G over 'group'. A KV head that has fewer copies than devices is
replicated over 'group', so tensor = kv * group may exceed K.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mooncake_jax.model_config import ModelConfig

MESH_AXES = ('kv', 'group')
Device = Any  # jax.Device is no type to a checker

# Logical axis (suffix letter) -> mesh axes. Axes not named are replicated.
Rules = Mapping[str, tuple[str, ...]]
TENSOR_PARALLEL: Rules = MappingProxyType(
  {
    'K': ('kv',),
    'G': ('group',),
    'F': ('kv', 'group'),
    'V': ('kv', 'group'),
  }
)


def make_mesh(devices: Sequence[Device], config: ModelConfig) -> Mesh:
  """Returns the mesh of one instance (or stage), tensor parallel over all.

  For 8 query and 2 KV heads on 4 devices: kv = 2, group = 2.

  Raises:
    ValueError: where neither KV heads nor query groups divide.
  """
  tensor = len(devices)
  if tensor < 1:
    raise ValueError(f'make_mesh: {devices=!r} is empty')
  kv = math.gcd(tensor, config.num_kv_heads)
  group = tensor // kv
  if config.num_groups % group:
    raise ValueError(
      f'make_mesh: {tensor=} devices cannot split '
      f'num_heads={config.num_heads} by num_kv_heads={config.num_kv_heads}: '
      f'{kv} of them split the KV heads, but {config.num_groups} query heads '
      f'a KV head are no multiple of the other {group}'
    )
  grid = np.asarray(devices, dtype=object).reshape(kv, group)
  return Mesh(grid, MESH_AXES, axis_types=(AxisType.Explicit,) * 2)


def local_heads(num_devices: int, config: ModelConfig) -> int:
  """KV heads of each device of such a mesh."""
  return config.num_kv_heads // math.gcd(num_devices, config.num_kv_heads)


def spec(
  mesh: Mesh | jax.sharding.AbstractMesh,
  axes: str,
  shape: Sequence[int],
  rules: Rules = TENSOR_PARALLEL,
) -> PartitionSpec:
  """Returns the partition of an array whose axes are named by letters.

  A dimension that its mesh axes do not divide is replicated.
  """
  assert len(axes) == len(shape), (axes, shape)
  return PartitionSpec(
    *map(lambda a, n: _split(mesh, rules, a, n), axes, shape)
  )


def _split(mesh, rules: Rules, axis: str, size: int):
  names = rules.get(axis, ())
  ways = math.prod(mesh.shape[name] for name in names)
  # A single head has nothing to split: a reshape would drop its axis' name.
  # Nor has one device: slices of what is whole say so.
  if not names or size % ways or size == 1 or ways == 1:
    return None
  return names[0] if len(names) == 1 else names


def named_sharding(
  mesh: Mesh,
  axes: str,
  shape: Sequence[int],
  rules: Rules = TENSOR_PARALLEL,
) -> NamedSharding:
  """`spec` on a mesh."""
  return NamedSharding(mesh, spec(mesh, axes, shape, rules))


def stacked_sharding(
  mesh: Mesh, axes: str, shape: Sequence[int], rules: Rules = TENSOR_PARALLEL
) -> NamedSharding:
  """`named_sharding`; axes that stand before the named ones are not split."""
  extra = len(shape) - len(axes)
  split = spec(mesh, axes, shape[extra:], rules)
  return NamedSharding(mesh, PartitionSpec(*(None,) * extra, *split))


def replicated(x: jax.Array) -> NamedSharding | None:
  """The sharding of an array whole on each device of `x`'s mesh.

  None where x lies on no mesh. Works on traced arrays, needs no context.
  """
  mesh = jax.typeof(x).sharding.mesh
  return None if mesh.empty else NamedSharding(mesh, PartitionSpec())


def place(tree: Any, mesh: Mesh) -> Any:
  """Copies host arrays whole to each device of a mesh.

  The partition has one entry a dimension, as step functions return it: a
  step's own output does not compile it anew.
  """

  def put(x) -> jax.Array:
    partition = PartitionSpec(*(None,) * np.ndim(x))
    return jax.device_put(x, NamedSharding(mesh, partition))

  return jax.tree.map(put, tree)
