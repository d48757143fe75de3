# SPDX-License-Identifier: Apache-2.0
"""One instance of the engine: its memory and the threads that serve it.

owner    runs programs on the devices; the only one to touch the pool
reader   waits for what the owner dispatched, in order
links    move arrays into the devices and into the pinned host segment
write, read   (with an SSD) copy parts to its segment and from it
"""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.assign import Device
from mooncake_jax.engine.chunk_run import ChunkRun
from mooncake_jax.engine.chunk_run import StageRun
from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.engine.owner import Owner
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.reader import Reader
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.weights import Weights
from mooncake_jax.model import sharding
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.heads import DevicePlace
from mooncake_jax.transfer.heads import HostPlace
from mooncake_jax.transfer.links import Link
from mooncake_jax.transfer.segment import HostSegment
from mooncake_jax.transfer.ssd import SsdSegment


class Instance:
  """Memory, owner, reader and links of one instance."""

  def __init__(
    self,
    config: ModelConfig,
    spec: InstanceSpec,
    devices: Sequence[Device],
    weights: Weights,
    layout: KVLayout,
    kv_dtype: jax.typing.DTypeLike,
    now_s: Callable[[], float],
    on_crash: Callable[[str, BaseException], None],
    prefill_program: Callable[..., Any],
  ):
    """Allocates pool and parameters and starts the threads."""
    self.spec = spec
    self.num_kv_heads = config.num_kv_heads
    mesh = sharding.make_mesh(devices, config)
    groups = spec.layer_groups(0, config.num_layers)
    placed = weights.on(mesh, spec.unroll, groups)
    self.model = MeshModel(
      config, spec, mesh, placed, groups, layout, kv_dtype, prefill_program
    )
    self.segment = HostSegment(spec.name, spec.host_bytes)
    block = BlockFormat(
      layout.num_layers,
      layout.block_size_tokens,
      config.num_kv_heads,
      config.head_dim,
      jax.numpy.dtype(kv_dtype),
    )
    self._ssd = open_ssd(spec, block)
    self.device_place = DevicePlace(mesh)
    self.host_place = HostPlace(mesh)
    staging = spec.staging_limit(layout.num_layers * layout.token_layer_bytes)
    self.staging = ByteBudget(staging, lambda: self.owner.poke())
    self.arrived = ByteBudget(staging)
    self.reader = Reader(f'{spec.name}-reader', now_s, on_crash)
    self._now_s = now_s
    self._desk = Desk(self.model, self.reader, self.staging)
    self.owner = Owner(f'{spec.name}-owner', self._desk, on_crash)
    self.device_link = Link(f'{spec.name}-device', on_crash, self.arrived)
    self.host_link = Link(f'{spec.name}-host', on_crash)
    self.ssd = (
      None if self._ssd is None else FarTier(self._ssd, on_crash, staging)
    )

  @property
  def groups(self) -> tuple[Layers, ...]:
    """Layer ranges that a chunk is computed in, one by one."""
    return self.model.groups

  def start_chunk(
    self,
    work_id: WorkId,
    chunk: PrefillChunk,
    when: Callable[[Layers, Callable[[str], None]], None],
    computed: Callable[[Layers], None],
    end: Callable[[Completion], None],
  ) -> ChunkRun:
    """Starts a chunk on the stages.

    Args:
      when: calls back once what the chunk waits for is done with a layer
        range, or with an error.
      computed, end: see `ChunkRun`.
    """
    poke = self.owner.poke
    run = ChunkRun(work_id, chunk, self._now_s, computed, end, poke)
    stage = StageRun(run, self._desk, poke, None)
    self.owner.post(stage)
    for i, layers in enumerate(stage.groups):
      when(layers, partial(stage.grant, i))
    return run

  def adopt(self) -> list[tuple[BlockKey, int]]:
    """Whole blocks that an earlier process left on the SSD: (key, bytes)."""
    return [] if self._ssd is None else self._ssd.adopt()

  def close(self) -> None:
    """Ends the threads; what is under way on the devices is waited for."""
    self.arrived.close()
    if self.ssd is not None:
      self.ssd.close()
    self.device_link.close()
    self.host_link.close()
    self.owner.close()
    self.reader.close()


def open_ssd(spec: InstanceSpec, block: BlockFormat) -> SsdSegment | None:
  """The instance's SSD segment, if it has one."""
  if spec.ssd_url is None:
    return None
  return SsdSegment(
    f'{spec.name}/ssd',
    spec.ssd_url,
    spec.ssd_bytes,
    block,
    file_io_sync=spec.ssd_sync,
  )
