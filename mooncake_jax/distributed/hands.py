# SPDX-License-Identifier: Apache-2.0
"""What drives one instance's backend by the driver's commands, without JAX.

One thread calls the backend, as the loop thread does in one process; commands
come in and completions go out past it.
"""

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
import itertools
import logging
import threading
import time
from typing import Any
from typing import Generic
from typing import Protocol
from typing import TypeVar

from mooncake_jax.backend import Backend
from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import Replica
from mooncake_jax.backend import WorkId
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.handover import Estate
from mooncake_jax.distributed.legs import comes_as
from mooncake_jax.distributed.reports import gathered
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.progress import MAX_FAILED
from mooncake_jax.request import BlockKey

LOOK_EVERY_S = 1.0
DRIVER_SILENCE_S = 30.0  # a driver asks for reports once a second


class Arriving(Protocol):
  """Who knows which parts of other instances come under which number."""

  def begin_at(self, number: int) -> None:
    """Numbers before this one were for a process that is no more."""
    ...

  def fail(self, number: int, error: Exception) -> None:
    """What is not there yet will not come."""
    ...

  def complete(self, number: int) -> None:
    """All of it has come and moved on."""
    ...

  def forget(self, number: int) -> None:
    """What comes later is not wanted."""
    ...


AnyBackend = TypeVar('AnyBackend', bound=Backend)


class Hands(Generic[AnyBackend]):
  """One instance, driven by commands. Any thread may call.

  Attributes:
    instance: its name.
    backend: of this one instance; a subclass makes it.
    arrivals: what others send.
    estate: what a driver leaves to the next; None where there are no bytes.
    changed: the lock of what it is told and tells; notified of either.
  """

  backend: AnyBackend
  arrivals: Arriving
  estate: Estate | None = None

  def __init__(self, instance: str, changed: threading.Condition | None = None):
    """Idle; `_begin` starts it.

    Args:
      changed: of all instances of this process; None is of this one alone.
    """
    self.instance = instance
    self.changed = threading.Condition() if changed is None else changed
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
    self._writes: dict[WorkId, list[Replica]] = {}
    self._driver = ''
    self._heard_s = self._told_s = time.monotonic()
    self._is_taken, self._let_go_why = True, ''
    self._thread = threading.Thread(
      target=self._main, name=f'{instance}-loop', daemon=True
    )

  def clock_s(self) -> float:
    """The driver's clock, as well as it is known."""
    return time.perf_counter() + self._offset_s

  def set_clock(self, ahead_s: float) -> None:
    """The driver's clock is so far ahead of this process's."""
    self._offset_s = ahead_s

  def take_over(self, driver: str, patience_s: float) -> None:
    """Makes it another driver's; what the one before had begun ends first.

    Raises:
      TimeoutError: it did not end within `patience_s`.
    """
    with self.changed:
      self._driver, self._heard_s = driver, time.monotonic()
      self._is_taken = False
      self._commands = [c.LetGo(f'{driver} has taken over')]
      self.backend.wake()
      if not self.changed.wait_for(lambda: self._is_taken, patience_s):
        raise TimeoutError(f'works under way did not end in {patience_s} s')

  def do(
    self, commands: Sequence[c.Command], driver: str | None = None
  ) -> None:
    """Has commands carried out, in order; ignores those of an old driver.

    Args:
      driver: whose they are; None: of this process itself.
    """
    with self.changed:
      if driver in (None, self._driver):
        self._commands += commands
      if driver == self._driver:  # before it asks for a first report, maybe
        self._heard_s = time.monotonic()
    self.backend.wake()

  def report(
    self, patience_s: float, driver: str = '', gather_s: float = 0.0
  ) -> c.Report:
    """What there is to tell; see `gathered`."""
    return gathered([self], patience_s, driver, gather_s)[self.instance]

  # See `reports.Telling`.

  def serves(self, driver: str) -> bool:
    return driver == self._driver

  def has_news(self) -> bool:
    return bool(self._report.completions or self._report.error)

  def has_end(self) -> bool:
    told = self._report
    return bool(told.error) or any(each.done for each in told.completions)

  def is_due(self, silence_s: float) -> bool:
    return time.monotonic() - self._told_s >= silence_s

  def take_report(self) -> c.Report:
    self._heard_s = self._told_s = time.monotonic()
    report = self._report
    self._report = c.Report(error=report.error, number=report.number + 1)
    return report

  def complete(self, report: c.Report) -> None:
    # In this order: counts of a new run are never told as an old one's.
    report.start_s = self._start_s
    report.link_uses = self.backend.link_uses()

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend`; before any work, or after `take_over`."""
    return [] if self.estate is None else self.estate.blocks(segment)

  def end(self) -> None:
    """Ends the thread; works under way are dropped."""
    with self.changed:
      self._is_closed = True
    self.backend.wake()
    self._thread.join()

  def _begin(self) -> None:
    """All is made: from now on commands are carried out."""
    self._thread.start()

  def _lead(self, instance: str, address: Address | None) -> None:
    """Notes where another instance listens; None: it is gone."""
    raise NotImplementedError

  def _restart(self, start_s: float) -> None:
    """The run starts at this time on the driver's clock."""
    raise NotImplementedError

  def _main(self) -> None:
    try:
      while not self._is_closed:
        for command in self._take():
          self._carry_out(command)
        self._look_after()
        until_s = self.backend.now_s() + LOOK_EVERY_S
        if completions := self.backend.wait(until_s):
          self._tell([self._named(each) for each in completions])
    except BaseException as error:
      with self.changed:
        self._report.error = describe(error)
        self.changed.notify_all()

  def _take(self) -> list[c.Command]:
    with self.changed:
      commands, self._commands = self._commands, []
      return commands

  def _tell(self, completions: list[Completion]) -> None:
    with self.changed:
      self._report.completions += completions
      number = self._report.number
      self.changed.notify_all()
    for each in completions:
      if each.done and (written := self._writes.pop(each.work_id, None)):
        if each.status == 'completed' and self.estate is not None:
          self.estate.wrote(written, number)

  def _look_after(self) -> None:
    """What no driver asks for: works of one that is no more end."""
    silent_s = time.monotonic() - self._heard_s
    if self._local and silent_s > DRIVER_SILENCE_S:
      self._let_go(f'its driver said nothing for {silent_s:.0f} s')
    if self._local:
      return
    self._let_go_why = ''
    if self._is_taken or self._commands:
      return
    if self.estate is not None:
      self.estate.hand_over()
    self._failed.clear()
    self._start_s, self._offset_s = None, 0.0
    with self.changed:
      self._report = c.Report(error=self._report.error)
      self._is_taken = True
      self.changed.notify_all()

  def _let_go(self, why: str) -> None:
    """Ends all works, as soon as they can."""
    self._let_go_why = why
    if self._local:
      logging.getLogger(__name__).warning(
        '%d works end: %s', len(self._local), why
      )
    for local in [*self._local.values()]:
      self.backend.cancel(local)
    for numbers in [*self._incoming.values()]:
      for number in numbers:
        self.arrivals.fail(number, ConnectionError(why))

  def _carry_out(self, command: c.Command) -> None:
    backend = self.backend
    match command:
      case c.Prefill() | c.Decode() | c.Transfer() | c.Probe():
        self._start(command)
      case c.Cancel():
        if (work_id := self._local.get(command.work_id)) is not None:
          backend.cancel(work_id)
      case c.Begin():
        self.arrivals.begin_at(command.number)
      case c.Forget():
        if self.estate is not None:
          self.estate.forget(command.replicas)
        backend.drop(command.replicas)
      case c.Heard():
        if self.estate is not None:
          self.estate.settle(command.report)
      case c.LetGo():
        self._let_go(command.why)
      case c.Miss():
        for number in command.numbers:
          self.arrivals.fail(number, ConnectionError(command.why))
      case c.Lead():
        self._lead(command.instance, command.address)
      case c.RestartClock():
        self._restart(command.start_s)
        self._start_s = command.start_s

  def _start(self, command: c.Starting) -> None:
    """Starts a work; one that can't start ends as 'failed'."""
    work_id = command.work_id
    try:
      if isinstance(command, c.Transfer):
        self._incoming[work_id] = arriving(command.ops)
        if self.estate is not None:
          self._writes[work_id] = self.estate.claim(command.ops)
      local = self._started(command)
    except Exception as error:
      now_s = self.backend.now_s()
      self._ended(work_id, None)
      ended = Completion(work_id, 'failed', now_s, now_s, describe(error))
      self._tell([ended])
    else:
      self._names[local], self._local[work_id] = work_id, local

  def _started(self, command: c.Starting) -> WorkId:
    backend, name = self.backend, self.instance
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
      case c.Probe():
        keys, deadline_s = command.keys, command.deadline_s
        return backend.probe(name, command.segment, keys, deadline_s)

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
    error = completion.error
    if completion.status == 'cancelled' and self._let_go_why:
      error = self._let_go_why
    return replace(completion, work_id=work_id, error=error)


def arriving(ops: Any) -> tuple[int, ...]:
  """Numbers of the parts that a transfer waits for."""
  if isinstance(ops, BlockOps):
    return ()
  return tuple(n for op in ops if (n := comes_as(op)) is not None)


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
