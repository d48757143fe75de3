# SPDX-License-Identifier: Apache-2.0
"""A worker: one instance with a JAX runtime of its own.

It runs the device backend of one instance; how it is driven stands in
`hands.py`. What goes between instances leaves over `Wire`s and comes in at a
`Landing`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
import threading
from typing import Protocol

import jax

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.distributed.handover import Estate
from mooncake_jax.distributed.hands import Hands
from mooncake_jax.distributed.holdings import holdings_of
from mooncake_jax.distributed.hosts import follow
from mooncake_jax.distributed.hosts import led
from mooncake_jax.distributed.job import JaxJob
from mooncake_jax.distributed.landing import Landing
from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.offers import PartShape
from mooncake_jax.distributed.probe import measure_wire
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.device import WIRE_LINES
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.engine.weights import ParamsSource
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.far import SharedSegment
from mooncake_jax.transfer.far import URGENT


class StoreSource(Protocol):
  """What opens the store that instances share; goes to another process."""

  def open(self, block: BlockFormat, host: str) -> SharedSegment:
    """A segment 'mooncake' of it, for the process at address `host`."""
    ...


@dataclass(frozen=True)
class WorkerSpec:
  """All that a worker is made of; goes to another process as it is.

  Attributes:
    instance: its sizes.
    peers: names of the cluster's other instances.
    params: a tree, or what loads one; see `DeviceBackend`. JAX's own arrays
      start JAX where they arrive, so what spans processes has none.
    prepare: called first of all, before JAX runs there.
    secret: what all workers of the cluster know.
    store: of all that prefill, and of other clusters.
    num_processes: that it spans, each with as many of its devices.
    job: of these this one; None where there is one.
  """

  config: ModelConfig
  layout: KVLayout
  instance: InstanceSpec
  peers: tuple[str, ...]
  params: ParamsSource
  kv_dtype: str
  wire: WireSpec
  secret: str
  prepare: Callable[[], None] = lambda: None
  store: StoreSource | None = None
  num_processes: int = 1
  job: JaxJob | None = None

  def __post_init__(self):
    name, count = self.instance.name, self.num_processes
    if count > 1 and self.instance.num_stages > 1:
      raise ValueError(
        f'WorkerSpec {name!r}: num_processes={count}, but only an instance of '
        f'one stage spans processes, not of {self.instance.num_stages}'
      )
    if count < 1 or self.instance.num_devices % count:
      raise ValueError(
        f'WorkerSpec {name!r}: num_processes={count} must divide its '
        f'num_devices={self.instance.num_devices}'
      )

  @property
  def name(self) -> str:
    """Of the instance."""
    return self.instance.name

  def can_be(self, role: str) -> bool:
    """See `backend.Sized`."""
    return self.instance.can_be(role)

  def with_secret(self, secret: str) -> 'WorkerSpec':
    """The same, with the secret of others."""
    return replace(self, secret=secret)

  def part(self, job: JaxJob) -> 'WorkerSpec':
    """See `spec.Spanning`."""
    return replace(self, job=job)

  def follow(self) -> None:
    """See `spec.Spanning`."""
    assert self.job is not None
    self.prepare()
    self.job.join()
    # SSDs are the first one's.
    own = replace(self.instance, ssd_url=None, ssd_bytes=0)
    what = (self.config, self.layout, [own], self.params)
    with DeviceBackend(*what, kv_dtype=self.kv_dtype) as backend:
      follow(backend)

  def start(
    self, process: str, bind: str, changed: threading.Condition | None = None
  ) -> 'Worker':
    """See `spec.ProcessSpec`."""
    wire = replace(self.wire, bind=bind)
    return Worker(replace(self, wire=wire), process, changed)


class Worker(Hands[DeviceBackend]):
  """One instance on devices, driven by commands. Any thread may call."""

  arrivals: Arrivals

  def __init__(
    self,
    spec: WorkerSpec,
    name: str,
    changed: threading.Condition | None = None,
  ):
    """Loads the instance, compiles, and listens.

    Args:
      name: of this process, which no earlier one had.
      changed: see `Hands`.
    """
    spec.prepare()
    if spec.job is not None:
      spec.job.join()
    super().__init__(spec.instance.name, changed)
    self._ends = ExitStack()
    self._mover = make_mover(
      spec.wire.mover, name, spec.wire.devices, spec.wire.bind
    )
    self.arrivals = Arrivals(spec.wire.in_flight_bytes)
    self._wires = {
      peer: Wire(peer, spec.wire, self._mover, spec.secret)
      for peer in spec.peers
    }
    stores = _stores(spec)
    self.backend = DeviceBackend(
      spec.config,
      spec.layout,
      [spec.instance],
      spec.params,
      kv_dtype=spec.kv_dtype,
      clock=self.clock_s,
      stores=stores,
      wires=[*self._wires.values()],
      arrivals=self.arrivals,
    )
    self.estate = Estate(self.backend, stores)
    if spec.job is not None:
      self._ends.enter_context(led(self.backend, spec.job.address))
    warmup(self.backend)
    self._shape = PartShape(
      spec.config.num_layers,
      spec.config.num_kv_heads,
      spec.config.head_dim,
      spec.instance.num_pages * spec.layout.page_tokens,
      jax.numpy.dtype(spec.kv_dtype),
    )
    self._landing = Landing(
      spec.wire, self._shape, self._mover, self.arrivals, spec.secret
    )
    self._begin()

  @property
  def address(self) -> Address:
    """Where it waits for other instances' bytes."""
    return self._landing.address

  def holdings(self) -> Holdings:
    """What it holds now."""
    return holdings_of(self.backend, self.arrivals, len(self._local))

  def measure_link(self, to: str) -> LinkSpeed:
    """Measures the way to another instance by parts of a block's size.

    Raises:
      OSError: it can't be measured now.
    """
    layout, wire = self.backend.layout, self._wires[to]
    part = self._shape.part(
      layout.layers_per_transfer, layout.block_size_tokens
    )
    return measure_wire(wire, self.backend.tiers[wire.name].write_link, part)

  def num_programs(self) -> int:
    """Programs compiled so far."""
    return self.backend.compiled_programs()

  def devices(self) -> list[DeviceName]:
    """See `OnDevices`."""
    return self.backend.devices()

  def close(self) -> None:
    """Ends all threads; works under way are dropped."""
    self.end()
    self.arrivals.close()
    self._landing.close()
    self.backend.close()
    self._ends.close()
    self._mover.close()

  def _lead(self, instance: str, address: Address | None) -> None:
    """Notes where an instance is, and opens the way on the wire's thread."""
    wire = self._wires[instance]
    wire.lead_to(address)
    if address is not None:
      greet = partial(wire.greet, self._shape.part())
      job = Job(0, lambda: True, greet, lambda error: None)
      for _ in range(WIRE_LINES):  # all threads have something to do
        self.backend.tiers[wire.name].write_link.submit(job, URGENT)

  def _restart(self, start_s: float) -> None:
    self.backend.restart_clock(start_s)


def _stores(spec: WorkerSpec) -> list[SharedSegment]:
  """Only prefill instances read and write there."""
  if spec.store is None or not spec.can_be('prefill'):
    return []
  dtype = jax.numpy.dtype(spec.kv_dtype)
  block = BlockFormat.of(spec.config, spec.layout.block_size_tokens, dtype)
  return [spec.store.open(block, spec.wire.bind)]
