# SPDX-License-Identifier: Apache-2.0
"""A run whose instances span processes, on one machine or on several.

Every process runs the same command, each with its number, or as SLURM, Open
MPI or Kubernetes numbers them, which JAX finds out itself. The first one
decides, serves and writes the results; the others do on their devices what it
tells.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
import signal
import socket
from typing import TYPE_CHECKING

from mooncake_jax.model_config import ModelConfig
from scripts.experiment import Experiment
from scripts.gin_source import ConfigError
from scripts.serving import MakeBackend
from scripts.serving import restarted

if TYPE_CHECKING:  # JAX is loaded where there are devices
  from mooncake_jax.engine.device import DeviceBackend


@dataclass(frozen=True)
class Hosts:
  """Which process of how many this is.

  Attributes:
    coordinator: HOST:PORT of the first process. What is None JAX finds out.
  """

  coordinator: str | None
  num_processes: int | None
  process_id: int | None

  def join(self, experiment: Experiment) -> bool:
    """Makes this process one of the job; whether it is the first."""
    import jax

    from scripts.device import num_devices
    from scripts.device import start_jax

    # A CPU's; where JAX is to find out the processes, more than are used.
    start_jax(-(-num_devices(experiment.cluster) // (self.num_processes or 1)))
    # It would take SIGTERM away from `resuming.ends_on_sigterm`.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
      self.coordinator, self.num_processes, self.process_id
    )
    return jax.process_index() == 0

  @property
  def address(self) -> str:
    """Where the others reach this one, the first."""
    if self.coordinator is not None:
      return self.coordinator.rpartition(':')[0]
    return socket.gethostbyname(socket.gethostname())


def add_options(parser: argparse.ArgumentParser) -> None:
  """Says of a process which one it is."""
  add = parser.add_argument
  add('--multihost', action='store_true', help='numbered as SLURM says')
  add('--coordinator', metavar='HOST:PORT', help='of the first process')
  add('--num-processes', type=int)
  add('--process-id', type=int, help='from 0')


def hosts_of(args: argparse.Namespace, experiment: Experiment) -> Hosts | None:
  """What the options say; None of a run in one process.

  Raises:
    ConfigError: some are missing, or the run needs none.
  """
  said = (args.coordinator, args.num_processes, args.process_id)
  if not args.multihost and not any(x is not None for x in said):
    return None
  if not args.multihost and None in said:
    raise ConfigError(
      f'--coordinator={said[0]} --num-processes={said[1]} '
      f'--process-id={said[2]}: give all three, or --multihost'
    )
  if experiment.backend != 'device':
    raise ConfigError(
      f'Experiment.backend={experiment.backend!r}: only "device" takes '
      'several processes'
    )
  return Hosts(*said)


@contextmanager
def on_hosts(
  hosts: Hosts, experiment: Experiment, config: ModelConfig
) -> Iterator[MakeBackend]:
  """As `serving.backends`, in the first of several processes."""
  from scripts.device import device_backend

  with device_backend(experiment, config, hosts) as backend:
    yield partial(restarted, backend)


@contextmanager
def led(backend: 'DeviceBackend', hosts: Hosts) -> Iterator[None]:
  """This process tells the others what its pools do."""
  from mooncake_jax.distributed.hosts import Leader
  from mooncake_jax.engine.spanning import SpanningPool

  leader = Leader(hosts.address)
  try:
    for name, instance in backend.instances.items():
      pool = instance.stages[0].desk.pool
      assert isinstance(pool, SpanningPool)
      pool.tell = partial(leader.tell, name)
    yield
  finally:
    leader.close()


def follow(experiment: Experiment) -> None:
  """Does what the first process tells, to its end.

  Raises:
    OSError: that process is gone.
  """
  from scripts.device import loaded

  # Told to end are all at once: the first ends, and tells the others.
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # SSDs and stores are the first one's.
  cluster = replace(experiment.cluster, ssd_bytes=0, mooncake_bytes=0)
  own = replace(experiment, cluster=cluster, store=None)
  with loaded(own, experiment.model.read_config()) as backend:
    _follow(backend)


def _follow(backend: 'DeviceBackend') -> None:
  from mooncake_jax.distributed.hosts import Followed
  from mooncake_jax.engine.spanning import Follower
  from mooncake_jax.engine.spanning import SpanningPool

  followers = {}
  for name, instance in backend.instances.items():
    desk = instance.stages[0].desk
    assert isinstance(desk.pool, SpanningPool) and desk.model is not None
    followers[name] = Follower(desk.pool, desk.model)
  leader = Followed()
  while (told := leader.next()) is not None:
    followers[told.pool].do(told.what, told.numbers, told.arrays)
  leader.close()
