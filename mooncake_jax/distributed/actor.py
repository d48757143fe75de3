# SPDX-License-Identifier: Apache-2.0
"""A worker as a Ray actor.

Calls of one group are carried out in the order they were made, by one thread;
so commands stay in order while a report is waited for.
"""

from collections.abc import Sequence
import os
from typing import Any
from typing import cast

import ray

from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.distributed.commands import Report
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.request import BlockKey

NODE = 'node'  # see `WireSpec.bind`
GROUPS = {'commands': 1, 'reports': 1}


class InstanceActor:
  """One instance; see `spec.Process`."""

  def __init__(self, spec: ProcessSpec, name: str):
    """Loads and compiles."""
    here = ray.util.get_node_ip_address() if spec.wire.bind == NODE else ''
    self._worker = spec.start(name, here or spec.wire.bind)

  def address(self) -> Address:
    """Where it listens; answers when it is ready."""
    return self._worker.address

  def clock_s(self) -> float:
    """This process's clock, or the driver's once that is known."""
    return self._worker.clock_s()

  def set_clock(self, ahead_s: float) -> None:
    self._worker.set_clock(ahead_s)

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    return self._worker.adopt(segment)

  def holdings(self) -> Holdings:
    return self._worker.holdings()

  def measure_link(self, to: str) -> LinkSpeed:
    return self._worker.measure_link(to)

  def num_programs(self) -> int:
    return self._worker.num_programs()

  def process_id(self) -> int:
    return os.getpid()

  def close(self) -> None:
    self._worker.close()

  @ray.method(concurrency_group='commands')
  def do(self, commands: Sequence[Command]) -> None:
    self._worker.do(commands)

  @ray.method(concurrency_group='reports')
  def report(self, patience_s: float) -> Report:
    return self._worker.report(patience_s)


def remote_actor() -> Any:
  """The class whose `remote` starts a process."""
  return cast(Any, ray.remote)(concurrency_groups=GROUPS)(InstanceActor)
