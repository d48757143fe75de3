# SPDX-License-Identifier: Apache-2.0
"""A worker as a Ray actor.

Calls of one group are carried out in the order they were made, by one thread;
so commands stay in order while a report is waited for.
"""

from collections.abc import Sequence
from dataclasses import fields
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
TAKE_S = 20.0  # for works to end that an earlier driver began
GROUPS = {'commands': 1, 'reports': 1}


class InstanceActor:
  """One instance; see `spec.Process`."""

  def __init__(self, spec: ProcessSpec, name: str, driver: str):
    """Loads and compiles."""
    self._spec = spec
    here = ray.util.get_node_ip_address() if spec.wire.bind == NODE else ''
    self._worker = spec.start(name, here or spec.wire.bind)
    self._worker.take_over(driver, TAKE_S)

  def address(self) -> Address:
    """Where it listens; answers when it is ready."""
    return self._worker.address

  def take_over(self, driver: str, spec: ProcessSpec) -> str:
    """See `Process.take_over`; returns the secret that is known here.

    Raises:
      ValueError: it was made of other things than that driver would have it.
    """
    if (here := made_of(self._spec)) != (wanted := made_of(spec)):
      raise ValueError(f'it is {here}, not {wanted}')
    self._worker.take_over(driver, TAKE_S)
    return self._spec.secret

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
  def do(self, commands: Sequence[Command], driver: str) -> None:
    self._worker.do(commands, driver)

  @ray.method(concurrency_group='reports')
  def report(self, patience_s: float, driver: str, gather_s: float) -> Report:
    return self._worker.report(patience_s, driver, gather_s)


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
    if name not in ('secret', 'prepare')
  )


def remote_actor() -> Any:
  """The class whose `remote` starts a process."""
  return cast(Any, ray.remote)(concurrency_groups=GROUPS)(InstanceActor)
