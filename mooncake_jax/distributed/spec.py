# SPDX-License-Identifier: Apache-2.0
"""Where instances run as processes, as a value that configs bind."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import threading
from typing import get_args
from typing import Literal
from typing import Protocol
from typing import runtime_checkable

from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.distributed.job import JaxJob
from mooncake_jax.distributed.reports import Telling
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.request import BlockKey

# A step of simulated instances takes some tens of milliseconds.
SIMULATED_GATHER_S = 0.1
MoverName = Literal['tcp', 'nixl', 'jax']


@dataclass(frozen=True)
class WireSpec:
  """How instances in different processes send each other KVCache.

  Attributes:
    mover: 'nixl', or 'tcp', which is slower and needs nothing, or 'jax', by
      `jax.experimental.transfer`.
    bind: the address that an instance listens at, of the interface that its
      bytes come over; others connect to it. 'node' is its machine's, as Ray
      knows it.
    devices: NIXL's network devices, as UCX names them; '' is all.
    checksums: whether each part is checked on arrival.
    stall_s: a send during which nothing moves fails after so long.
    in_flight_bytes: that may have come and not yet moved on.
  """

  mover: MoverName = 'nixl'
  bind: str = '127.0.0.1'
  devices: str = ''
  checksums: bool = False
  stall_s: float = 5.0
  in_flight_bytes: int = 256 << 20

  def __post_init__(self):
    if self.mover not in get_args(MoverName):
      raise ValueError(
        f'WireSpec.mover={self.mover!r} must be one of {get_args(MoverName)}'
      )
    for name in ('stall_s', 'in_flight_bytes'):
      if getattr(self, name) <= 0:
        raise ValueError(f'WireSpec.{name}={getattr(self, name)} must be > 0')


@dataclass(frozen=True)
class RaySpec:
  """Instances as actors of a Ray cluster.

  Attributes:
    address: of a cluster that runs, 'auto' or 'HOST:PORT'; None starts one on
      this machine and ends it afterwards.
    name: instances outlive their driver under this name, and the next driver
      of that name takes them over with the blocks that they hold; '' has them
      end with it. Needs an `address`.
    wire: how KVCache gets from process to process.
    devices_per_process: an instance of more spans processes of so many each,
      on nodes of their own where there are several; None: none does.
    num_cpus, num_gpus: that a process takes of its node.
    resources: more of what a process takes, by its first instance: where it
      goes.
    start_s: how long an instance may take to load and compile.
    silence_s: an instance that tells nothing for so long is taken for lost.
    max_restarts: how often one that was lost is started again.
    measures_links: the Conductor believes of transfers between instances what
      is measured as their wires open, instead of its costs' copy and handoff.
    gather_s: how long tokens wait for more of them before the driver is told,
      unless a work ends; their times are told, so no figure changes. A call
      costs the driver about as much whether it tells of one step or of ten.
      None is not at all on devices, 0.1 where instances are simulated.
    simulated: whether instances compute nothing and move nothing, but take
      the time that the costs say: processes without devices.
    instances_per_process: of simulated ones so many share a process, which
      is lost with all of them; those absent at first have their own.
  """

  address: str | None = None
  name: str = ''
  wire: WireSpec = WireSpec()
  devices_per_process: int | None = None
  num_cpus: float = 1.0
  num_gpus: float = 0.0
  resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
  start_s: float = 600.0
  silence_s: float = 15.0
  max_restarts: int = 3
  measures_links: bool = False
  gather_s: float | None = None
  simulated: bool = False
  instances_per_process: int = 1

  def __post_init__(self):
    if self.name and self.address is None:
      raise ValueError(
        f'RaySpec.name={self.name!r} needs RaySpec.address: a cluster that a '
        'driver starts ends with it'
      )
    for name in ('start_s', 'silence_s'):
      if getattr(self, name) <= 0:
        raise ValueError(f'RaySpec.{name}={getattr(self, name)} must be > 0')
    for name in ('num_cpus', 'num_gpus', 'max_restarts', 'gather_s'):
      if (getattr(self, name) or 0) < 0:
        raise ValueError(f'RaySpec.{name}={getattr(self, name)} must be >= 0')
    if self.devices_per_process is not None and self.devices_per_process < 1:
      raise ValueError(
        f'RaySpec.devices_per_process={self.devices_per_process} must be >= 1'
      )
    count = self.instances_per_process
    if count < 1 or (count > 1 and not self.simulated):
      raise ValueError(
        f'RaySpec.instances_per_process={count} must be 1, or more where '
        'instances are simulated'
      )

  @property
  def tokens_wait_s(self) -> float:
    """How long tokens wait for more of them."""
    if self.gather_s is not None:
      return self.gather_s
    return SIMULATED_GATHER_S if self.simulated else 0.0


class Process(Telling, Protocol):
  """One instance in this process, driven by the driver's commands.

  Any thread may call.
  """

  @property
  def address(self) -> Address:
    """Where it waits for what other instances send."""
    ...

  def clock_s(self) -> float:
    """The driver's clock, as well as it is known."""
    ...

  def set_clock(self, ahead_s: float) -> None:
    """The driver's clock is so far ahead of this process's."""
    ...

  def take_over(self, driver: str, patience_s: float) -> None:
    """Makes it another driver's; what the one before had begun ends first.

    Raises:
      TimeoutError: it did not end within `patience_s`.
    """
    ...

  def do(self, commands: Sequence[Command], driver: str) -> None:
    """Has commands carried out, in order; ignores those of an old driver."""
    ...

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend`; before any work."""
    ...

  def holdings(self) -> Holdings:
    """What it holds now."""
    ...

  def measure_link(self, to: str) -> LinkSpeed:
    """Measures the way to another instance. OSError if it can't, now."""
    ...

  def num_programs(self) -> int:
    """Programs compiled so far."""
    ...

  def devices(self) -> list[DeviceName]:
    """What it computes on."""
    ...

  def close(self) -> None:
    """Ends all threads; works under way are dropped."""
    ...


class ProcessSpec(Protocol):
  """What an instance's process is made of; goes there as it is."""

  @property
  def name(self) -> str:
    """Of the instance."""
    ...

  @property
  def wire(self) -> WireSpec:
    """How it sends and listens."""
    ...

  @property
  def secret(self) -> str:
    """What all processes of the cluster know."""
    ...

  def with_secret(self, secret: str) -> 'ProcessSpec':
    """The same, with the secret of others."""
    ...

  def can_be(self, role: str) -> bool:
    """See `backend.Sized`."""
    ...

  def start(
    self, process: str, bind: str, changed: threading.Condition | None = None
  ) -> Process:
    """Makes the instance, in the process of a name that none had before.

    Args:
      bind: the address to listen at.
      changed: of all instances of that process; see `Hands`.
    """
    ...


@runtime_checkable
class Spanning(ProcessSpec, Protocol):
  """`ProcessSpec` of what may span several processes, the first of which leads.

  They are those of one `jax.distributed` job.
  """

  @property
  def num_processes(self) -> int:
    """That it spans."""
    ...

  def part(self, job: JaxJob) -> 'Spanning':
    """The same, for one of them."""
    ...

  def follow(self) -> None:
    """Does in this process, which is not the first, what that one tells.

    Raises:
      OSError: that one is gone.
    """
    ...


def num_processes(spec: ProcessSpec) -> int:
  """That an instance spans."""
  return spec.num_processes if isinstance(spec, Spanning) else 1
