# SPDX-License-Identifier: Apache-2.0
"""All stages of an instance as one program over a 'stage' axis.

The stages keep their own pools on their own sub-meshes, where copies go in and
out. For a tick the same memory is one array over all devices: put together
and taken apart again without a copy, donated and written in place.

Z stage, T chunk token, D model, P page.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.engine.stage_pool import ChunkInputs
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.model.params import Params
from mooncake_jax.model.tick import enter
from mooncake_jax.model.tick import STAGE
from mooncake_jax.model_config import ModelConfig


class TickModel:
  """Dispatches ticks. One owner thread's."""

  def __init__(
    self,
    config: ModelConfig,
    pools: Sequence[StagePool],
    params: Sequence[Params],
    largest_chunk: int,
    programs: PrefillPrograms,
  ):
    """Takes a tree of stacked layers for each stage, on its sub-mesh.

    The first one has the tables of all.
    """
    self._config = config
    self._pools = pools
    self._programs = programs
    self._tables = {k: v for k, v in params[0].items() if k != 'layers'}
    grid = np.stack([pool.mesh.devices for pool in pools])
    axes = (STAGE, *pools[0].mesh.axis_names)
    self.mesh = Mesh(grid, axes, axis_types=(AxisType.Explicit,) * len(axes))
    self._by_stage = NamedSharding(self.mesh, PartitionSpec(STAGE))
    most = max(pool.kv.shape[0] for pool in pools)
    layers = [_padded(tree['layers'], most) for tree in params]
    self._layers = jax.tree.map(lambda *a: self._join(a), *layers)
    shape = (len(pools), 1, largest_chunk, config.model_dim)
    dtype = self._tables['embed'].dtype
    self._x_Z1TD = jnp.zeros(shape, dtype, device=self._by_stage)

  def tick(self, chunks: Sequence[ChunkInputs | None]) -> jax.Array:
    """Advances each stage by its chunk; None is a stage without.

    Returns:
      What the stages take next. It is there when the tick has ended.
    """
    x_Z1TD = self._x_Z1TD if chunks[0] is None else self._entered(chunks[0])
    sizes = [len(chunk.tokens_T) for chunk in chunks if chunk]
    host = (
      np.stack([_field(c, 'page_table_P', self._table) for c in chunks]),
      np.array([_field(c, 'start', 0) for c in chunks], np.int32),
      np.array([_field(c, 'length', 0) for c in chunks], np.int32),
      np.array([self._num_layers(i) if c else 0 for i, c in enumerate(chunks)]),
    )
    kv = self._join([pool.kv for pool in self._pools])
    with jax.set_mesh(self.mesh):
      self._x_Z1TD, kv = self._programs.tick(
        self._layers,
        self._config,
        kv,
        x_Z1TD,
        *jax.device_put(host, self._by_stage),
        size=max(sizes),
      )
    for pool, part in zip(self._pools, self._split(kv)):
      pool.kv = part
    return self._x_Z1TD

  def draw(self, chunk: ChunkInputs) -> jax.Array:
    """The report on the token after what left the last stage in a tick."""
    first = self._pools[0]
    x_11TD = self._split(self._x_Z1TD)[0]
    inputs = first.put((chunk.start, chunk.length, chunk.sampling))
    with jax.set_mesh(first.mesh):
      report_R, _ = self._programs.leave(
        self._tables, self._config, x_11TD, *inputs
      )
    report_R.copy_to_host_async()
    return report_R

  @property
  def _table(self) -> np.ndarray:
    return np.zeros(self._pools[0].table_pages, np.int32)

  def _num_layers(self, stage: int) -> int:
    start, stop = self._pools[stage].layers
    return stop - start

  def _entered(self, chunk: ChunkInputs) -> jax.Array:
    """What the stages take once the first one has a new chunk."""
    first = self._pools[0]
    tokens_T = np.zeros(self._x_Z1TD.shape[2], np.int32)
    tokens_T[: len(chunk.tokens_T)] = chunk.tokens_T
    with jax.set_mesh(first.mesh):
      x_11TD = enter(self._tables, first.put(tokens_T))
    return self._join([x_11TD, *self._split(self._x_Z1TD)[1:]])

  def _join(self, parts: Sequence[jax.Array]) -> jax.Array:
    """One array of the stages' arrays, behind each other on the first axis."""
    first = parts[0]
    shape = (len(parts) * first.shape[0], *first.shape[1:])
    spec = (*_spec(first), *(None,) * first.ndim)[1 : first.ndim]
    placed = NamedSharding(self.mesh, PartitionSpec(STAGE, *spec))
    shards = [s.data for part in parts for s in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, placed, shards)

  def _split(self, whole: jax.Array) -> list[jax.Array]:
    """The stages' arrays on their sub-meshes."""
    shape = (whole.shape[0] // len(self._pools), *whole.shape[1:])
    shards = {s.device: s.data for s in whole.addressable_shards}
    spec = PartitionSpec(None, *_spec(whole)[1:])
    return [
      jax.make_array_from_single_device_arrays(
        shape,
        NamedSharding(pool.mesh, spec),
        [shards[device] for device in pool.mesh.devices.flat],
      )
      for pool in self._pools
    ]


def _spec(array: jax.Array) -> PartitionSpec:
  assert isinstance(array.sharding, NamedSharding)
  return array.sharding.spec


def _field(chunk: ChunkInputs | None, name: str, default: Any) -> Any:
  return default if chunk is None else getattr(chunk, name)


def _padded(layers: dict[str, jax.Array], count: int) -> dict[str, jax.Array]:
  """Stacked layers, and zeros behind them; no copy where there are enough."""

  def pad(a: jax.Array) -> jax.Array:
    if len(a) == count:
      return a
    more = [(0, count - len(a))] + [(0, 0)] * (a.ndim - 1)
    return jax.device_put(np.pad(np.asarray(a), more), a.sharding)

  return jax.tree.map(pad, layers)
