# SPDX-License-Identifier: Apache-2.0
"""A worker whose instance is simulated, at the pace of the clock.

The driver does all that it does with real ones, so that what hundreds of them
cost it can be measured. No JAX in this process.
"""

from collections import defaultdict
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
import resource
import threading

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import WorkId
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.costs.model import CostModel
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.hands import Hands
from mooncake_jax.distributed.legs import place
from mooncake_jax.distributed.legs import sent_as
from mooncake_jax.distributed.sim_backend import PartBackend
from mooncake_jax.distributed.sim_landing import SimLanding
from mooncake_jax.distributed.sim_landing import SimWires
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.sim.paced import LEAST_TICK_S

MANY_BYTES = 1 << 30


@dataclass(frozen=True)
class SimWorkerSpec:
  """All that a simulated worker is made of; see `spec.ProcessSpec`.

  Attributes:
    name: of the instance, which can be of either role.
    costs: what its work takes.
    stage_layers: layers of each of its stages where it prefills.
    boundary_s: until the next stage has what a stage computed.
    secret: what all workers of the cluster know.
    gather_s: tokens that come closer together are told together.
  """

  name: str
  costs: CostModel
  stage_layers: tuple[int, ...]
  boundary_s: float
  wire: WireSpec
  secret: str
  gather_s: float = 0.0

  def can_be(self, role: str) -> bool:
    """See `backend.Sized`."""
    return True

  def with_secret(self, secret: str) -> 'SimWorkerSpec':
    """The same, with the secret of others."""
    return replace(self, secret=secret)

  def start(
    self, process: str, bind: str, changed: threading.Condition | None = None
  ) -> 'SimWorker':
    """See `spec.ProcessSpec`."""
    wire = replace(self.wire, bind=bind)
    return SimWorker(replace(self, wire=wire), changed)


class SimWorker(Hands[PartBackend]):
  """One simulated instance, driven by commands. Any thread may call."""

  def __init__(
    self, spec: SimWorkerSpec, changed: threading.Condition | None = None
  ):
    """Listens; see `Hands`."""
    super().__init__(spec.name, changed)
    self._spec = spec
    self._outgoing: dict[WorkId, dict[str, list[int]]] = {}
    self._wires = SimWires(spec.wire, spec.secret)
    self._landing = SimLanding(
      spec.wire, spec.secret, lambda numbers: self.do([c.Landed(numbers)])
    )
    self._restart(self.clock_s())
    self._begin()

  @property
  def address(self) -> Address:
    """Where others tell it what has arrived."""
    return self._landing.address

  def holdings(self) -> c.Holdings:
    """See `Process`."""
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    rss_bytes = pages * resource.getpagesize()
    num_works = len(self._local)
    return c.Holdings(num_works, 0, {}, threading.active_count(), 0, rss_bytes)

  def measure_link(self, to: str) -> LinkSpeed:
    """What the costs say of it."""
    latency_s = self._spec.costs.transfer_s(0, 'handoff')
    whole_s = self._spec.costs.transfer_s(MANY_BYTES, 'handoff')
    return LinkSpeed(latency_s, MANY_BYTES / (whole_s - latency_s))

  def num_programs(self) -> int:
    """None: nothing is computed."""
    return 0

  def devices(self) -> list[DeviceName]:
    """None."""
    return []

  def close(self) -> None:
    """See `Process`."""
    self.end()
    self._landing.close()
    self._wires.close_all()

  def _carry_out(self, command: c.Command) -> None:
    if isinstance(command, c.Landed):
      for number in command.numbers:
        self.backend.landed(number)
    else:
      super()._carry_out(command)

  def _lead(self, instance: str, address: Address | None) -> None:
    self._wires.lead(instance, address)

  def _restart(self, start_s: float) -> None:
    """Makes a new backend, as a simulation's time does not go back."""
    spec = self._spec
    self.backend = self.arrivals = PartBackend(
      spec.costs,
      spec.stage_layers,
      spec.boundary_s,
      self.clock_s,
      start_s,
      max(spec.gather_s, LEAST_TICK_S),
    )
    self.backend.wake()  # whoever woke the old one

  def _started(self, command: c.Starting) -> WorkId:
    local = super()._started(command)
    if isinstance(command, c.Transfer):
      self._outgoing[local] = _outgoing(command)
    return local

  def _named(self, completion: Completion) -> Completion:
    if completion.done:
      outgoing = self._outgoing.pop(completion.work_id, {})
      if completion.status == 'completed':
        completion = self._send(completion, outgoing)
    return super()._named(completion)

  def _send(
    self, completion: Completion, outgoing: dict[str, list[int]]
  ) -> Completion:
    """Tells others what they have got."""
    try:
      for name, numbers in outgoing.items():
        self._wires.tell(name, numbers)
    except OSError as error:
      return replace(
        completion, status='failed', error=str(error), op_status=()
      )
    return completion


def _outgoing(command: c.Transfer) -> dict[str, list[int]]:
  """Numbers that a transfer sends, by instance."""
  found: dict[str, list[int]] = defaultdict(list)
  if not isinstance(command.ops, BlockOps):
    for op in command.ops:
      if (number := sent_as(op)) is not None:
        found[place(op.dst)].append(number)
  return found
