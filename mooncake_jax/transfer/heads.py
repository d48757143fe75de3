# SPDX-License-Identifier: Apache-2.0
"""A block as slices of its KV heads, and where the slices go.

A block's bytes are canonical, [L, 2, S, K, H], whatever mesh they lie on. On
a mesh of n KV shards they are n arrays [L, 2, S, K/n, H], one a shard; moving
a block moves those arrays whole, for memory on the host is never indexed
(no program may take a host array). Where source and destination split the
heads differently, the destination's devices cut and join what arrived.

L layer, S token, K KV head, H head dim.
"""

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import SingleDeviceSharding
import numpy as np

from mooncake_jax.model.sharding import named_sharding

# Arrays [L, 2, S, K/n, H] on one device each, in order of their heads; NumPy's
# where they were just read from a far segment.
HeadSlices = tuple[jax.Array | np.ndarray, ...]


def split_heads(block_L2SKH: jax.Array) -> HeadSlices:
  """Returns one copy of each head slice of a block on a mesh; moves none."""
  slices: dict[int, jax.Array] = {}
  for shard in block_L2SKH.addressable_shards:
    slices.setdefault(shard.index[3].start or 0, shard.data)
  return tuple(slices[start] for start in sorted(slices))


def overlapping(num_source: int, num_target: int, target: int) -> range:
  """The source slices that hold heads of slice `target` of `num_target`.

  For 2 source slices and 4 targets: 0 -> [0], 1 -> [0], 2 -> [1], 3 -> [1].
  """
  first = target * num_source // num_target
  return range(first, -(-(target + 1) * num_source // num_target))


@partial(jax.jit, static_argnames=('start_head', 'num_heads', 'layers'))
def join_heads(
  slices: HeadSlices, start_head: int, num_heads: int, layers: tuple[int, int]
) -> jax.Array:
  """Joins slices and keeps a range of their heads and layers.

  Compiles once a shape and range.
  """
  block_L2SKH = jnp.concatenate(slices, axis=3)
  stop_head = start_head + num_heads
  return block_L2SKH[layers[0] : layers[1], :, :, start_head:stop_head]


@dataclass(frozen=True)
class HostPlace:
  """Pinned host memory of an instance's devices, one copy of each head."""

  mesh: Mesh

  def targets(
    self, num_slices: int
  ) -> Iterator[tuple[int, SingleDeviceSharding]]:
    """Yields (source slice, where it goes): each slice once, kept as it is."""
    devices = self.mesh.devices[:, 0]
    for i in range(num_slices):
      device = devices[i * len(devices) // num_slices]
      yield i, SingleDeviceSharding(device, memory_kind='pinned_host')


@dataclass(frozen=True)
class DevicePlace:
  """Device memory of an instance's mesh, every device its own heads."""

  mesh: Mesh

  def targets(
    self, num_slices: int
  ) -> Iterator[tuple[int, SingleDeviceSharding]]:
    """Yields (source slice, where it goes), device after device."""
    for kv, row in enumerate(self._rows):
      for device in row:
        for i in overlapping(num_slices, len(self._rows), kv):
          yield i, SingleDeviceSharding(device, memory_kind='device')

  def sources(self, num_slices: int) -> list[int]:
    """The source slices of `targets`."""
    num_kv = len(self._rows)
    return [
      i
      for kv, row in enumerate(self._rows)
      for i in [*overlapping(num_slices, num_kv, kv)] * len(row)
    ]

  @cached_property
  def _rows(self) -> tuple[tuple[Any, ...], ...]:
    """Its devices, those with the same heads together."""
    return tuple(map(tuple, self.mesh.devices))

  def assemble(
    self,
    moved: list[jax.Array],
    num_slices: int,
    num_kv_heads: int,
    layers: tuple[int, int],
  ) -> jax.Array:
    """Makes a block [L, 2, S, K, H] on the mesh of what `targets` moved.

    Args:
      moved: the arrays, in the order of `targets(num_slices)`.
      layers: [start, stop) to keep of the arrays' layers.
    """
    arrived = iter(moved)
    num_kv, num_group = self.mesh.devices.shape
    num_heads = num_kv_heads // num_kv
    local = []
    for kv in range(num_kv):
      sources = overlapping(num_slices, num_kv, kv)
      start_head = kv * num_heads - sources[0] * num_kv_heads // num_slices
      for _ in range(num_group):
        slices = tuple(next(arrived) for _ in sources)
        local.append(_fit(slices, start_head, num_heads, layers))
    return self._global(local, num_kv_heads)

  def arrived(
    self,
    moved: list[Any],
    num_slices: int,
    num_kv_heads: int,
    layers: tuple[int, int],
  ) -> tuple[Callable[[], jax.Array], dict[Any, np.ndarray] | None]:
    """What `assemble` makes, and the same by device if it is host memory.

    There it is made when it is asked for: it may not be needed.
    """
    how = (num_slices, num_kv_heads, layers)
    if not isinstance(moved[0], np.ndarray):
      block_L2SKH = self.assemble(moved, *how)
      return lambda: block_L2SKH, None
    local = self._local(moved, *how)

    def on_mesh() -> jax.Array:
      parts = [jax.device_put(part, device) for device, part in local.items()]
      return self._global(parts, num_kv_heads)

    return on_mesh, local

  def _local(
    self,
    moved: list[np.ndarray],
    num_slices: int,
    num_kv_heads: int,
    layers: tuple[int, int],
  ) -> dict[Any, np.ndarray]:
    """Views of what was moved, where one slice has all a device's heads."""
    arrived = iter(moved)
    num_kv = len(self._rows)
    num_heads = num_kv_heads // num_kv
    parts = {}
    for kv, row in enumerate(self._rows):
      sources = overlapping(num_slices, num_kv, kv)
      start_head = kv * num_heads - sources[0] * num_kv_heads // num_slices
      heads = slice(start_head, start_head + num_heads)
      for device in row:
        slices = [next(arrived) for _ in sources]
        block = slices[0] if len(slices) == 1 else np.concatenate(slices, 3)
        parts[device] = block[layers[0] : layers[1], :, :, heads]
    return parts

  def _global(self, local: list[jax.Array], num_kv_heads: int) -> jax.Array:
    L, two, S, _, H = local[0].shape
    shape = (L, two, S, num_kv_heads, H)
    return jax.make_array_from_single_device_arrays(
      shape, self.block_sharding(shape), local
    )

  def block_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
    """How a block [L, 2, S, K, H] lies on the mesh."""
    return named_sharding(self.mesh, 'L2SKH', shape)


@dataclass(frozen=True)
class SpanningPlace(DevicePlace):
  """A mesh of several processes: blocks come to the first, which tells them."""

  def targets(
    self, num_slices: int
  ) -> Iterator[tuple[int, SingleDeviceSharding]]:
    """Yields (source slice, where it goes): each once."""
    device = self.mesh.devices[0, 0]
    for i in range(num_slices):
      yield i, SingleDeviceSharding(device, memory_kind='device')

  def sources(self, num_slices: int) -> list[int]:
    """The source slices of `targets`."""
    return [*range(num_slices)]

  def arrived(
    self,
    moved: list[Any],
    num_slices: int,
    num_kv_heads: int,
    layers: tuple[int, int],
  ) -> tuple[Callable[[], Any], None]:
    """What makes a block [L, 2, S, K, H] in this process's memory."""

    def whole() -> np.ndarray:
      block = np.concatenate([*map(np.asarray, moved)], axis=3)
      return block[layers[0] : layers[1]]

    return whole, None


def spans_processes(mesh: Mesh) -> bool:
  return len({device.process_index for device in mesh.devices.flat}) > 1


def _fit(
  slices: HeadSlices, start_head: int, num_heads: int, layers: tuple[int, int]
) -> jax.Array:
  """Joins and cuts on the device the slices lie on; nothing if they fit."""
  first = slices[0]
  whole = len(slices) == 1 and first.shape[3] == num_heads
  if whole and layers == (0, len(first)):
    assert isinstance(first, jax.Array)  # it was moved here
    return first
  return join_heads(slices, start_head, num_heads, layers)
