# SPDX-License-Identifier: Apache-2.0
"""A worker: one instance with a JAX runtime of its own.

It runs the device backend of one instance. One thread calls that backend, as
the loop thread does in one process; commands come in and completions go out
past it. What goes between instances leaves over `Wire`s and comes in at a
`Landing`.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
import itertools
import threading
import time
from typing import Any

import jax

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import Replica
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.holdings import Holdings
from mooncake_jax.distributed.holdings import holdings_of
from mooncake_jax.distributed.landing import Landing
from mooncake_jax.distributed.landing import PartShape
from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.probe import measure_wire
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.device import WIRE_LINES
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.progress import MAX_FAILED
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.engine.weights import ParamsSource
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.arrivals import ARRIVALS
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.far import URGENT

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class WorkerSpec:
  """All that a worker is made of; goes to another process as it is.

  Attributes:
    instance: its sizes.
    peers: names of the cluster's other instances.
    params: a tree, or what loads one; see `DeviceBackend`.
    prepare: called first of all, before JAX runs there.
    secret: what all workers of the cluster know.
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


class Worker:
  """One instance, driven by commands. Any thread may call."""

  def __init__(self, spec: WorkerSpec, name: str):
    """Loads the instance, compiles, and listens.

    Args:
      name: of this process, which no earlier one had.
    """
    spec.prepare()
    self._changed = threading.Condition()
    self._commands: list[c.Command] = []
    self._report = c.Report()
    self._is_closed = False
    self._offset_s = 0.0
    self._start_s: float | None = None
    # Works under way, by the driver's number; and by ours.
    self._local: dict[WorkId, WorkId] = {}
    self._names: dict[WorkId, WorkId] = {}
    # Those that ended badly, the oldest first; None: it could not start.
    self._failed: OrderedDict[WorkId, WorkId | None] = OrderedDict()
    self._incoming: dict[WorkId, tuple[int, ...]] = {}
    self._mover = make_mover(spec.wire.mover, name, spec.wire.devices)
    self.arrivals = Arrivals(spec.wire.in_flight_bytes)
    self._wires = {
      peer: Wire(peer, spec.wire, self._mover, spec.secret)
      for peer in spec.peers
    }
    self.backend = DeviceBackend(
      spec.config,
      spec.layout,
      [spec.instance],
      spec.params,
      kv_dtype=spec.kv_dtype,
      clock=self.clock_s,
      wires=[*self._wires.values()],
      arrivals=self.arrivals,
    )
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
    self._thread = threading.Thread(
      target=self._main, name=f'{name}-loop', daemon=True
    )
    self._thread.start()

  @property
  def address(self) -> Address:
    """Where it waits for other instances' bytes."""
    return self._landing.address

  def clock_s(self) -> float:
    """The driver's clock, as well as it is known."""
    return time.perf_counter() + self._offset_s

  def set_clock(self, ahead_s: float) -> None:
    """The driver's clock is so far ahead of this process's."""
    self._offset_s = ahead_s

  def do(self, commands: Sequence[c.Command]) -> None:
    """Has commands carried out, in order."""
    with self._changed:
      self._commands += commands
    self.backend.wake()

  def report(self, patience_s: float) -> c.Report:
    """What there is to tell; waits for it, at most so long."""
    with self._changed:
      self._changed.wait_for(self._has_news, patience_s)
      report = self._report
      self._report = c.Report(error=report.error)
    # In this order: counts of a new run are never told as an old one's.
    report.start_s = self._start_s
    report.link_uses = self.backend.link_uses()
    return report

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend`; before any work."""
    return self.backend.adopt(segment)

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

  def close(self) -> None:
    """Ends all threads; works under way are dropped."""
    with self._changed:
      self._is_closed = True
    self.backend.wake()
    self._thread.join()
    self.arrivals.close()
    self._landing.close()
    self.backend.close()
    self._mover.close()

  def _has_news(self) -> bool:
    return bool(self._report.completions or self._report.error)

  def _main(self) -> None:
    try:
      while not self._is_closed:
        for command in self._take():
          self._carry_out(command)
        until_s = self.backend.now_s() + LOOK_EVERY_S
        if completions := self.backend.wait(until_s):
          self._tell([self._named(each) for each in completions])
    except BaseException as error:
      with self._changed:
        self._report.error = describe(error)
        self._changed.notify_all()

  def _take(self) -> list[c.Command]:
    with self._changed:
      commands, self._commands = self._commands, []
      return commands

  def _tell(self, completions: list[Completion]) -> None:
    with self._changed:
      self._report.completions += completions
      self._changed.notify_all()

  def _carry_out(self, command: c.Command) -> None:
    backend = self.backend
    match command:
      case c.Prefill() | c.Decode() | c.Transfer():
        self._start(command)
      case c.Cancel():
        if (work_id := self._local.get(command.work_id)) is not None:
          backend.cancel(work_id)
      case c.Begin():
        self.arrivals.begin_at(command.number)
      case c.Forget():
        backend.drop(command.replicas)
      case c.Miss():
        for number in command.numbers:
          self.arrivals.fail(number, ConnectionError(command.why))
      case c.Lead():
        self._lead(command)
      case c.RestartClock():
        backend.restart_clock(command.start_s)
        self._start_s = command.start_s

  def _lead(self, command: c.Lead) -> None:
    """Notes where an instance is, and opens the way on the wire's thread."""
    wire = self._wires[command.instance]
    wire.lead_to(command.address)
    if command.address is not None:
      greet = partial(wire.greet, self._shape.part())
      job = Job(0, lambda: True, greet, lambda error: None)
      for _ in range(WIRE_LINES):  # all threads have something to do
        self.backend.tiers[wire.name].write_link.submit(job, URGENT)

  def _start(self, command: c.Prefill | c.Decode | c.Transfer) -> None:
    """Starts a work; one that can't start ends as 'failed'."""
    work_id = command.work_id
    try:
      if isinstance(command, c.Transfer):
        self._incoming[work_id] = arriving(command.ops)
      local = self._started(command)
    except Exception as error:
      now_s = self.backend.now_s()
      self._ended(work_id, None)
      ended = Completion(work_id, 'failed', now_s, now_s, describe(error))
      self._tell([ended])
    else:
      self._names[local], self._local[work_id] = work_id, local

  def _started(self, command: c.Prefill | c.Decode | c.Transfer) -> WorkId:
    backend, (name,) = self.backend, self.backend.instances
    match command:
      case c.Prefill():
        after = self._known(command.after)
        return backend.prefill(name, command.chunk, after)
      case c.Decode():
        return backend.decode(name, command.batch, command.max_steps)
      case c.Transfer():
        after = self._known(command.after)
        return backend.transfer(
          command.ops, command.priority, command.deadline_s, after
        )

  def _known(self, after: tuple[WorkId, ...]) -> tuple[WorkId, ...]:
    """By this backend's numbers; those long ended have completed.

    Raises:
      RuntimeError: one of them could not start.
    """
    known = []
    for work_id in after:
      local = self._local.get(work_id, self._failed.get(work_id))
      if local is not None:
        known.append(local)
      elif work_id in self._failed:
        raise RuntimeError(
          f'work {work_id}, which it waits for, could not start'
        )
    return tuple(known)

  def _ended(self, work_id: WorkId, local: WorkId | None) -> None:
    """A work has ended badly; what others still send it is not wanted."""
    for number in self._incoming.pop(work_id, ()):
      self.arrivals.forget(number)
    self._failed[work_id] = local
    if len(self._failed) > MAX_FAILED:
      self._failed.popitem(last=False)

  def _named(self, completion: Completion) -> Completion:
    """By the driver's number."""
    local = completion.work_id
    work_id = self._names[local]
    if completion.done:
      del self._names[local], self._local[work_id]
      if completion.status == 'completed':
        for number in self._incoming.pop(work_id, ()):
          self.arrivals.complete(number)
      else:
        self._ended(work_id, local)
    return replace(completion, work_id=work_id)


def arriving(ops: Any) -> tuple[int, ...]:
  """Numbers of the parts that a transfer waits for."""
  if isinstance(ops, BlockOps):
    return ()
  return tuple(
    op.src.replica_id
    for op in ops
    if isinstance(op.src, Replica) and op.src.segment == ARRIVALS
  )


def ping(rounds: int, ask: Callable[[], float]) -> float:
  """How far this process's clock is ahead of the one that `ask` reads.

  Half of the quickest answer's time bounds the error.
  """
  best_s, ahead_s = float('inf'), 0.0
  for _ in itertools.repeat(None, rounds):
    sent_s = time.perf_counter()
    theirs_s = ask()
    took_s = time.perf_counter() - sent_s
    if took_s < best_s:
      best_s, ahead_s = took_s, sent_s + took_s / 2 - theirs_s
  return ahead_s
