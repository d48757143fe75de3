# SPDX-License-Identifier: Apache-2.0
"""One instance of the engine: its memory and the threads that serve it.

owner    runs programs on a stage's devices; the only one to touch its pool
reader   waits for what the owner dispatched, in order
links    move arrays into the devices and into the pinned host segment
write, read   (with an SSD) copy parts to its segment and from it
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence

import jax

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine import mpmd
from mooncake_jax.engine import spmd
from mooncake_jax.engine.assign import Device
from mooncake_jax.engine.build import Builder
from mooncake_jax.engine.chunk_run import ChunkRun
from mooncake_jax.engine.chunk_run import When
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.owner import Owner
from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.weights import Weights
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.far import FarTier
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
    programs: PrefillPrograms,
    owner: Owner | None = None,
  ):
    """Allocates pools and parameters and starts the threads.

    Args:
      owner: of the instance whose devices it shares.

    Raises:
      ValueError: its stages are not the model's, or its SSD can't be had.
    """
    self.spec = spec
    self.num_kv_heads = config.num_kv_heads
    self.page_tokens = layout.page_tokens
    self._now_s = now_s
    is_ticked = spec.executor == 'spmd' and spec.num_stages > 1
    self._start = spmd.start if is_ticked else mpmd.start
    self.segment = HostSegment(spec.name, spec.host_bytes)
    block = BlockFormat.of(
      config, layout.block_size_tokens, jax.numpy.dtype(kv_dtype)
    )
    staging = spec.staging_limit(layout.num_layers * layout.token_layer_bytes)
    self.stages: list[Stage] = []
    self.staging = ByteBudget(staging, self._poke)
    self.arrived = ByteBudget(staging)
    self._ssd = open_ssd(spec, block)
    self.device_link = Link(f'{spec.name}-device', on_crash, self.arrived)
    self.host_link = Link(f'{spec.name}-host', on_crash)
    self.ssd = (
      None if self._ssd is None else FarTier(self._ssd, on_crash, staging)
    )
    try:
      builder = Builder(
        config, spec, devices, weights, layout, kv_dtype, programs, owner
      )
      self._attention = builder.kernel
      for stage in builder.stages(self.staging, now_s, on_crash):
        self.stages.append(stage)
    except BaseException:
      self.close()  # neither threads with their pools nor the SSD's lock stay
      raise

  @property
  def num_step_programs(self) -> int:
    """Batch sizes that decode steps were compiled for."""
    models = [stage.desk.model for stage in self.stages]
    return sum(model.steps.num_programs for model in models if model)

  @property
  def devices(self) -> list[DeviceName]:
    """Of its stages, one after the other."""
    meshes = [stage.desk.pool.mesh for stage in self.stages]
    used = [device for mesh in meshes for device in mesh.devices.flat]
    precision: str | None = jax.config.jax_default_matmul_precision  # pyright: ignore
    about = (self._attention, precision)
    return [DeviceName(d.platform, str(d), *about) for d in used]

  @property
  def groups(self) -> list[Layers]:
    """Layer ranges that a chunk is computed in, one by one."""
    return [g for stage in self.stages for g in stage.groups]

  def stages_of(self, layers: Layers) -> list[tuple[Stage, Layers]]:
    """The stages that have some of the layers, and which."""
    shares = [(stage, stage.shared(layers)) for stage in self.stages]
    return [(stage, share) for stage, share in shares if share]

  def start_chunk(
    self,
    work_id: WorkId,
    chunk: PrefillChunk,
    when: When,
    computed: Callable[[Layers], None],
    end: Callable[[Completion], None],
  ) -> ChunkRun:
    """Starts a chunk on the stages; see `ChunkRun` and `mpmd.start`."""
    run = ChunkRun(work_id, chunk, self._now_s, computed, end, self._poke)
    self._start(run, self.stages, when)
    return run

  def start_decode(self, task: DecodeTask) -> None:
    """Starts a decode work."""
    if len(self.stages) > 1:
      task.fail(ValueError(f'{self.spec.name} has stages: it only prefills'))
      return
    self.stages[0].post(task)

  def restart_clock(self) -> None:
    """The clock was set to 0. Only while nothing is under way."""
    for stage in self.stages:
      stage.desk.reader.restart_clock()

  def _poke(self) -> None:
    """Makes all owners look again what may go on. Any thread may call."""
    for stage in self.stages:
      stage.owner.poke()

  def adopt(self) -> list[tuple[BlockKey, int]]:
    """Whole blocks that an earlier process left on the SSD: (key, bytes)."""
    return [] if self._ssd is None else self._ssd.adopt()

  def keep_only(
    self, numbers: Mapping[int, int], ssd_keys: Collection[BlockKey]
  ) -> None:
    """Forgets all other blocks of host memory, and of the SSD.

    Args:
      numbers: by a replica's the one that it has from now on.
    """
    self.segment.keep_only(numbers)
    if self._ssd is not None and self.ssd is not None:
      self._ssd.keep_only(ssd_keys)
      self.ssd.clean()

  def close(self) -> None:
    """Ends the threads; what is under way on the devices is waited for."""
    self.arrived.close()
    if self.ssd is not None:
      self.ssd.close()
    self.device_link.close()
    self.host_link.close()
    for stage in self.stages:
      stage.owner.close()
    for stage in self.stages:
      stage.desk.reader.close()


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
