# SPDX-License-Identifier: Apache-2.0
"""Makes an instance's stages: sub-meshes, pools, parameters and threads."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.assign import Device
from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.engine.mpmd import StagePipe
from mooncake_jax.engine.owner import Owner
from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.reader import Reader
from mooncake_jax.engine.spanning import SpanningPool
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spmd import TickPipe
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tick_model import TickModel
from mooncake_jax.engine.weights import Weights
from mooncake_jax.model import kernels
from mooncake_jax.model import sharding
from mooncake_jax.model.products import can_stay_stacked
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.heads import spans_processes

Crash = Callable[[str, BaseException], None]


class Builder:
  """What the stages of one instance are made of."""

  def __init__(
    self,
    config: ModelConfig,
    spec: InstanceSpec,
    devices: Sequence[Device],
    weights: Weights,
    layout: KVLayout,
    kv_dtype: jax.typing.DTypeLike,
    programs: PrefillPrograms,
    owner: Owner | None = None,
  ):
    """Checks that the stages are the model's; raises ValueError.

    Args:
      owner: that serves this instance too; None makes one.
    """
    self._config = config
    self._spec = spec
    self._devices = devices
    self._layout = layout
    self._kv_dtype = kv_dtype
    self.kernel: kernels.AttentionKernel = self._chosen()
    self._weights = weights
    self._programs = programs.with_attention(self.kernel)
    self._owner = owner
    self._ranges = spec.stage_ranges(config.num_layers)

  def stages(
    self, staging: ByteBudget, now_s: Callable[[], float], on_crash: Crash
  ) -> Iterator[Stage]:
    """Allocates pools and parameters and starts the threads."""
    if self._is_ticked:
      yield from self._spmd(staging, now_s, on_crash)
    else:
      yield from self._mpmd(staging, now_s, on_crash)

  @property
  def _is_ticked(self) -> bool:
    return self._spec.executor == 'spmd' and self._spec.num_stages > 1

  def _mpmd(
    self, staging: ByteBudget, now_s: Callable[[], float], on_crash: Crash
  ) -> Iterator[Stage]:
    """Threads and programs for each stage."""
    for i, (mesh, layers) in enumerate(self._places()):
      name = self._spec.name
      if len(self._ranges) > 1:
        name += f'-stage{i}'
      groups = self._spec.layer_groups(*layers)
      # Weights first: to arrange them takes memory that the pool has later.
      params = self._weights.on(mesh, self._unrolls, groups)
      pool = self._pool(mesh, layers)
      model = MeshModel(
        self._config,
        pool,
        params,
        groups,
        self._programs.prefill,
        self.kernel,
      )
      desk = Desk(
        pool, Reader(f'{name}-reader', now_s, on_crash), staging, model
      )
      yield Stage(desk, self._owner_of(name, desk, on_crash))

  def _chosen(self) -> kernels.AttentionKernel:
    """The kernel of attention."""
    spec, config = self._spec, self._config
    device, choice = self._devices[0], spec.attention
    if self._is_ticked and choice == 'auto' and device.platform != 'cpu':
      return 'jnp'  # the others don't run inside a program of all stages
    heads = sharding.local_heads(spec.num_devices, config)
    pages_shape = self._layout.page_tokens, heads, config.head_dim
    dtype = jax.numpy.dtype(self._kv_dtype)
    return kernels.chosen(choice, device, pages_shape, dtype)

  @property
  def _unrolls(self) -> bool:
    """On a CPU XLA's products take a third longer for weights of a stack."""
    spec, on_cpu = self._spec, self._devices[0].platform == 'cpu'
    if spec.unroll is not None:
      return spec.unroll
    stays = can_stay_stacked(max(spec.batch_sizes), self.kernel)
    return on_cpu and spec.role != 'prefill' and not stays

  def _owner_of(self, name: str, desk: Desk, on_crash: Crash) -> Owner:
    """A thread for a stage, or that of the instance it shares devices with."""
    if self._owner is None:
      return Owner(f'{name}-owner', desk, StagePipe(), on_crash)
    self._owner.share(desk)
    return self._owner

  def _spmd(
    self, staging: ByteBudget, now_s: Callable[[], float], on_crash: Crash
  ) -> Iterator[Stage]:
    """One owner, one reader, and one program over all stages."""
    places = list(self._places())
    most = max(stop - start for start, stop in self._ranges)
    params = [
      self._weights.on(mesh, False, [layers], tables=i == 0)[0]
      for i, (mesh, layers) in enumerate(places)
    ]
    pools = [self._pool(mesh, layers, most) for mesh, layers in places]
    largest = max(self._spec.chunk_buckets)
    model = TickModel(self._config, pools, params, largest, self._programs)
    name = self._spec.name
    reader = Reader(f'{name}-reader', now_s, on_crash)
    desks = [Desk(pool, reader, staging) for pool in pools]
    pipe = TickPipe(model, reader)
    owner = Owner(f'{name}-owner', desks[0], pipe, on_crash)
    pipe.stages = [Stage(desk, owner) for desk in desks]
    yield from pipe.stages

  def _places(self) -> Iterator[tuple[Mesh, Layers]]:
    """The sub-mesh and the layers of each stage."""
    size = len(self._devices) // len(self._ranges)
    for i, layers in enumerate(self._ranges):
      own = self._devices[i * size : (i + 1) * size]
      yield sharding.make_mesh(own, self._config), layers

  def _pool(
    self, mesh: Mesh, layers: Layers, num_layers: int | None = None
  ) -> StagePool:
    what = (mesh, layers, self._layout, self._kv_dtype, num_layers)
    if not spans_processes(mesh):
      return StagePool(self._config, self._spec, *what)
    if len(self._ranges) > 1:
      raise ValueError(
        f'InstanceSpec {self._spec.name!r}: stage_layers='
        f'{self._spec.stage_layers}, but only an instance of one stage spans '
        'processes'
      )
    return SpanningPool(self._config, self._spec, *what)
