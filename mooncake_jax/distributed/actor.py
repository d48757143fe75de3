# SPDX-License-Identifier: Apache-2.0
"""A process of the cluster as a Ray actor: an instance, or several.

Calls of one group are carried out in the order they were made, by one thread;
so commands stay in order while a report is waited for.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import fields
import os
import threading
from typing import Any
from typing import cast

import ray
from ray.util.placement_group import PlacementGroup

from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.distributed.commands import Report
from mooncake_jax.distributed.group import lead
from mooncake_jax.distributed.reports import gathered
from mooncake_jax.distributed.spec import Process
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import Spanning
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.request import BlockKey

NODE = 'node'  # see `WireSpec.bind`
TAKE_S = 20.0  # for works to end that an earlier driver began
GROUPS = {'commands': 1, 'reports': 1}


class InstanceActor:
  """Instances of one process, by name; see `spec.Process`."""

  def __init__(self, specs: Sequence[ProcessSpec], name: str, driver: str):
    """Loads and compiles.

    Args:
      name: of the process, which none had before.
    """
    self._specs, changed = specs, threading.Condition()
    self._instances: dict[str, Process] = {
      spec.name: _start(spec, name, changed) for spec in specs
    }
    self._all = [*self._instances.values()]
    for each in self._all:
      each.take_over(driver, TAKE_S)

  def addresses(self) -> dict[str, Address]:
    """Where they listen; answers when all are ready."""
    return {name: each.address for name, each in self._instances.items()}

  def take_over(self, driver: str, specs: Sequence[ProcessSpec]) -> str:
    """See `Process.take_over`; returns the secret that is known here.

    Raises:
      ValueError: it was made of other things than that driver would have it.
    """
    here, wanted = ('; '.join(map(made_of, s)) for s in (self._specs, specs))
    if here != wanted:
      raise ValueError(f'it is {here}, not {wanted}')
    for each in self._all:
      each.take_over(driver, TAKE_S)
    return self._specs[0].secret

  def group(self) -> PlacementGroup | None:
    """The places of this process and those that follow it, if some do."""
    return ray.util.get_current_placement_group()

  def clock_s(self) -> float:
    """This process's clock, or the driver's once that is known."""
    return self._all[0].clock_s()

  def set_clock(self, ahead_s: float) -> None:
    for each in self._all:
      each.set_clock(ahead_s)

  def left(self) -> dict[str, list[tuple[BlockKey, int]]]:
    """What an earlier process or driver left, by segment."""
    return {
      segment: each.adopt(segment)
      for name, each in self._instances.items()
      for segment in (name, ssd_segment(name))
    }

  def holdings(self, instance: str) -> Holdings:
    return self._instances[instance].holdings()

  def measure_link(self, instance: str, to: str) -> LinkSpeed:
    return self._instances[instance].measure_link(to)

  def num_programs(self, instance: str) -> int:
    return self._instances[instance].num_programs()

  def devices(self, instance: str) -> list[DeviceName]:
    return self._instances[instance].devices()

  def process_id(self) -> int:
    return os.getpid()

  @ray.method(concurrency_group='commands')
  def do(self, told: Mapping[str, Sequence[Command]], driver: str) -> None:
    for name, commands in told.items():
      self._instances[name].do(commands, driver)

  @ray.method(concurrency_group='reports')
  def report(
    self, patience_s: float, driver: str, gather_s: float
  ) -> dict[str, Report]:
    """See `gathered`."""
    return gathered(self._all, patience_s, driver, gather_s)


def _start(
  spec: ProcessSpec, process: str, changed: threading.Condition
) -> Process:
  """Makes an instance, of which this process may be the first of several."""
  bind = spec.wire.bind
  here = ray.util.get_node_ip_address() if bind == NODE else bind
  if isinstance(spec, Spanning) and spec.num_processes > 1:
    spec = lead(spec, here)
  return spec.start(process, here, changed)


def made_of(spec: Any) -> str:
  """What an instance is, and so what KVCache it can hold.

  Of parameters what loads them; a tree's values are not compared.
  """
  found = {f.name: getattr(spec, f.name) for f in fields(spec)}
  if not callable(found.get('params')):
    found.pop('params', None)
  return ', '.join(
    f'{name}={value}'
    for name, value in found.items()
    if name not in ('secret', 'prepare', 'job')
  )


def remote_actor() -> Any:
  """The class whose `remote` starts a process."""
  return cast(Any, ray.remote)(concurrency_groups=GROUPS)(InstanceActor)
