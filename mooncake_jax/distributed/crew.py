# SPDX-License-Identifier: Apache-2.0
"""The workers' processes: started, listened to, missed, started again.

One thread waits for reports of all; each restart has a thread for as long as
it takes. What they find is news for the loop thread, in order.
"""

from collections.abc import Collection
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.exceptions import RayError

from mooncake_jax.backend import LinkUse
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.commands import Report
from mooncake_jax.distributed.hands import ping
from mooncake_jax.distributed.launching import CALL_S
from mooncake_jax.distributed.launching import join_ray
from mooncake_jax.distributed.launching import Launcher
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.request import BlockKey

REPORT_S = 1.0  # a worker answers at least so often
PINGS = 16


@dataclass(frozen=True)
class Lost:
  """A worker's process is no more, or says nothing."""

  why: str


@dataclass(frozen=True)
class Joined:
  """A worker was started again and listens at `address`."""

  address: Address


News = Report | Lost | Joined


@dataclass(eq=False)
class _Member:
  """One process of an instance."""

  name: str
  actor: Any
  address: Address
  process_id: int
  heard_s: float
  last: Report = field(default_factory=Report)


class Crew:
  """The processes of a cluster's instances, by name.

  Attributes:
    gather_s: see `RaySpec`; may be set.
  """

  def __init__(
    self,
    workers: Sequence[ProcessSpec],
    spec: RaySpec,
    absent: Collection[str] = (),
  ):
    """Starts all but the absent and waits until they are ready.

    Raises:
      RuntimeError: one of them can't start.
    """
    names = [worker.name for worker in workers]
    self._launcher = Launcher(workers, spec)
    self._spec = spec
    self.gather_s = spec.gather_s
    self._changed = threading.Condition()
    self._news: list[tuple[str, News]] = []
    self._woken = False
    self._crash: BaseException | None = None
    self._is_closed = False
    # Who is to be there, and how often each may still be started.
    self._wanted = {*names} - {*absent}
    self._tries = dict.fromkeys(names, spec.max_restarts)
    self._owns_ray = join_ray(spec, len(workers))
    self._members: dict[str, _Member] = {}
    # As of the news taken: what is told to a process is for that process.
    self._known: dict[str, _Member] = {}
    self._launching: dict[str, Any] = {}
    self._starters: dict[str, threading.Thread] = {}
    self._looked_s = time.monotonic()
    self._adopted: set[str] = set()  # segments
    try:
      left = self._launcher.take_over(self._wanted)
      self._taken_over = frozenset(left)
      actors = {
        name: left.get(name) or self._launcher.launch(name)
        for name in names
        if name in self._wanted
      }
      for name, actor in actors.items():
        self._members[name] = self._ready(name, actor)
      self._known = {**self._members}
    except BaseException:
      self._shut_down()
      raise
    self._thread = threading.Thread(target=self._main, name='crew', daemon=True)
    self._thread.start()

  @property
  def addresses(self) -> dict[str, Address]:
    """Where the processes listen, of which `take` has told."""
    with self._changed:
      return {name: member.address for name, member in self._known.items()}

  def link_uses(self, start_s: float) -> dict[tuple[str, str], LinkUse]:
    """What instances told last of their links in the run that began then."""
    with self._changed:
      told = [member.last for member in self._members.values()]
    now: dict[tuple[str, str], LinkUse] = {}
    for report in told:
      if report.start_s == start_s:
        for link, use in report.link_uses.items():
          old = now.get(link, LinkUse(0, 0.0))
          now[link] = LinkUse(
            old.num_bytes + use.num_bytes, old.used_s + use.used_s
          )
    return now

  def tell(self, name: str, commands: Sequence[Command]) -> None:
    """Sends commands to an instance; one that is no more does not mind."""
    if (member := self._member(name)) is not None:
      member.actor.do.remote(commands, self._launcher.driver)

  def take(self, timeout_s: float) -> tuple[list[tuple[str, News]], bool]:
    """Waits for news, in order; also tells whether it was woken.

    Raises:
      RuntimeError: the thread that listens ended by an error.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._news or self._woken or self._crash,
        max(0.0, min(timeout_s, CALL_S)),
      )
      if self._crash:
        raise RuntimeError(f'crew ended by {self._crash!r}') from self._crash
      news, self._news = self._news, []
      self._known = {**self._members}
      woken, self._woken = self._woken, False
      return news, woken

  def wake(self) -> None:
    """Ends the `take` under way, or the next one, early."""
    with self._changed:
      self._woken = True
      self._changed.notify_all()

  def ask(
    self, method: str, *args: Any, names: Sequence[str]
  ) -> dict[str, Any]:
    """Calls a method of some of the workers; those that don't answer lack."""
    refs = {
      name: getattr(member.actor, method).remote(*args)
      for name in names
      if (member := self._member(name)) is not None
    }
    answers = {}
    for name, ref in refs.items():
      try:
        answers[name] = ray.get(ref, timeout=CALL_S)
      except RayError:
        continue
    return answers

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """What an earlier process or driver left there; told once."""
    name = owner(segment)
    is_left = medium(segment) == 'ssd' or name in self._taken_over
    if segment in self._adopted or not is_left:
      return []
    self._adopted.add(segment)
    return self.ask('adopt', segment, names=[name]).get(name, [])

  @property
  def process_ids(self) -> dict[str, int]:
    """Numbers of the instances' processes on their hosts, as of now."""
    with self._changed:
      return {name: each.process_id for name, each in self._members.items()}

  def bring(self, name: str) -> None:
    """Has an instance started that is not there; news tell when it is."""
    with self._changed:
      self._wanted.add(name)
      self._tries[name] = 1 + self._spec.max_restarts
      if name not in self._members:
        self._begin(name)

  def dismiss(self, name: str) -> None:
    """Ends an instance's process, which is not started again."""
    with self._changed:
      self._wanted.discard(name)
      member, coming = self._members.get(name), self._launching.get(name)
    if coming is not None:
      ray.kill(coming)  # so that who waits for it hears
    if member is not None:
      self._lose(member, f'{name} was let go')

  def close(self, ends_named: bool = False) -> None:
    """Ends all processes, and Ray if it was started here.

    Those with a name stay for the next driver, unless `ends_named`.
    """
    with self._changed:
      self._is_closed = True
      launching = [*self._launching.values()]
      starters = [*self._starters.values()]
    for actor in launching:
      ray.kill(actor)
    for thread in (self._thread, *starters):
      thread.join()
    self._shut_down(ends_named or not self._spec.name)

  def _shut_down(self, ends_all: bool = True) -> None:
    for member in self._members.values():
      if ends_all:
        ray.kill(member.actor)
    if self._owns_ray:
      ray.shutdown()

  def _ready(self, name: str, actor: Any) -> _Member:
    """Waits until a process is there and knows the time."""
    try:
      address = ray.get(actor.address.remote(), timeout=self._spec.start_s)
      ahead_s = ping(
        PINGS, lambda: ray.get(actor.clock_s.remote(), timeout=CALL_S)
      )
      ray.get(actor.set_clock.remote(ahead_s), timeout=CALL_S)
      process_id: Any = ray.get(actor.process_id.remote(), timeout=CALL_S)
    except RayError as error:
      ray.kill(actor)
      why = 'it took too long' if isinstance(error, GetTimeoutError) else error
      raise RuntimeError(f'instance {name!r} did not start: {why}') from error
    return _Member(name, actor, tuple(address), process_id, time.monotonic())

  def _member(self, name: str) -> _Member | None:
    with self._changed:
      return self._known.get(name)

  def _post(self, name: str, news: News) -> None:
    with self._changed:
      self._news.append((name, news))
      self._changed.notify_all()

  def _main(self) -> None:
    try:
      asked: dict[Any, _Member] = {}
      while not self._is_closed:
        self._ask_all(asked)
        if not asked:
          time.sleep(0.05)  # nobody is there to listen to
          continue
        ray.wait([*asked], num_returns=1, timeout=0.2)
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=0)
        for ref in ready:
          self._hear(asked.pop(ref), ref)
        self._miss_silent(asked)
    except BaseException as error:
      with self._changed:
        self._crash = error
        self._changed.notify_all()

  def _ask_all(self, asked: dict[Any, _Member]) -> None:
    with self._changed:
      silent = {*self._members.values()} - {*asked.values()}
    for member in silent:
      # Nobody has asked it before, however long the others took to start.
      member.heard_s = time.monotonic()
      ref = member.actor.report.remote(
        REPORT_S, self._launcher.driver, self.gather_s
      )
      asked[ref] = member

  def _hear(self, member: _Member, ref: Any) -> None:
    try:
      report: Any = ray.get(ref)
    except RayError as error:
      self._lose(member, f'{member.name} was lost: {_short(error)}')
      return
    if report.is_refused:
      raise RuntimeError(f'another driver has taken over {member.name}')
    member.heard_s, member.last = time.monotonic(), report
    if report.error:
      self._lose(member, f'{member.name} was lost: {report.error}')
    elif report.completions:
      self._post(member.name, report)

  def _miss_silent(self, asked: dict[Any, _Member]) -> None:
    now_s = time.monotonic()
    asleep_s, self._looked_s = now_s - self._looked_s, now_s
    for ref, member in [*asked.items()]:
      if asleep_s > REPORT_S:  # it was not the others who did not answer
        member.heard_s += asleep_s
      silent_s = now_s - member.heard_s
      if silent_s > self._spec.silence_s:
        del asked[ref]
        self._lose(member, f'{member.name} said nothing for {silent_s:.0f} s')

  def _lose(self, member: _Member, why: str) -> None:
    """A process is no more, or may not go on; another one may be started."""
    ray.kill(member.actor)
    with self._changed:
      if self._members.get(member.name) is not member:
        return  # two have noticed
      del self._members[member.name]
      logging.getLogger(__name__).warning(why)
      self._post(member.name, Lost(why))
      self._begin(member.name)

  def _begin(self, name: str) -> None:
    """Under the lock: has a thread start it, if it may and none does."""
    if name not in self._starters and name in self._wanted:
      thread = self._starters[name] = threading.Thread(
        target=self._start, args=(name,), name=f'start {name}', daemon=True
      )
      thread.start()

  def _start(self, name: str) -> None:
    """Starts an instance, as often as it may, until it is there."""
    while (actor := self._launch_again(name)) is not None:
      try:
        member = self._ready(name, actor)
      except RuntimeError:
        continue
      if self._admit(member):
        return

  def _launch_again(self, name: str) -> Any | None:
    """The next process to try with; None ends the trying."""
    with self._changed:
      self._launching.pop(name, None)
      if self._is_closed or name not in self._wanted or not self._tries[name]:
        del self._starters[name]
        return None
      self._tries[name] -= 1
      actor = self._launching[name] = self._launcher.launch(name)
      return actor

  def _admit(self, member: _Member) -> bool:
    """Makes it the instance's process, if that is still wanted."""
    with self._changed:
      if member.name not in self._wanted:
        ray.kill(member.actor)
        return False
      del self._launching[member.name], self._starters[member.name]
      self._members[member.name] = member
      self._post(member.name, Joined(member.address))
      return True


def _short(error: BaseException) -> str:
  """The first line of an error."""
  return f'{type(error).__name__}: {str(error).partition(chr(10))[0]}'
