# SPDX-License-Identifier: Apache-2.0
"""A stage: a layer range of an instance on devices of its own."""

from dataclasses import dataclass
from functools import cached_property

from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.owner import Owner
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tasks import Task
from mooncake_jax.transfer.heads import DevicePlace
from mooncake_jax.transfer.heads import HostPlace
from mooncake_jax.transfer.heads import SpanningPlace
from mooncake_jax.transfer.heads import spans_processes


@dataclass(frozen=True, eq=False)
class Stage:
  """Its pool and parameters, and the thread that uses them.

  Attributes:
    owner: of this stage alone, or of all stages that run one program.
  """

  desk: Desk
  owner: Owner

  @property
  def layers(self) -> Layers:
    """[start, stop) of the model."""
    return self.desk.pool.layers

  @property
  def groups(self) -> tuple[Layers, ...]:
    """Layer ranges that a chunk is computed in, one by one."""
    model = self.desk.model
    return (self.layers,) if model is None else model.groups

  def post(self, task: Task | DecodeTask) -> None:
    """Queues a copy out of the pool or into it, or a decode work."""
    self.owner.post(task, self.desk)

  def shared(self, layers: Layers) -> Layers | None:
    """Which of the layers it has."""
    start = max(layers[0], self.layers[0])
    stop = min(layers[1], self.layers[1])
    return (start, stop) if start < stop else None

  @cached_property
  def device_place(self) -> DevicePlace:
    mesh = self.desk.pool.mesh
    return (SpanningPlace if spans_processes(mesh) else DevicePlace)(mesh)

  @cached_property
  def host_place(self) -> HostPlace:
    return HostPlace(self.desk.pool.mesh)
