# SPDX-License-Identifier: Apache-2.0
"""The workers' processes: started, listened to, missed, started again.

One thread waits for reports of all; each restart has a thread for as long as
it takes. What they find is news for the loop thread, in order.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError

from mooncake_jax.backend import LinkUse
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.commands import Command
from mooncake_jax.distributed.launching import CALL_S
from mooncake_jax.distributed.launching import join_ray
from mooncake_jax.distributed.launching import Launched
from mooncake_jax.distributed.launching import Launcher
from mooncake_jax.distributed.member import Joined
from mooncake_jax.distributed.member import Lost
from mooncake_jax.distributed.member import meet
from mooncake_jax.distributed.member import Member
from mooncake_jax.distributed.member import News
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.request import BlockKey

REPORT_S = 1.0  # a worker answers at least so often


class Crew:
  """The processes of a cluster's instances.

  All but news is kept by process, under the name of its first instance.
  """

  def __init__(
    self,
    workers: Sequence[ProcessSpec],
    spec: RaySpec,
    absent: Collection[str] = (),
    on_start: Callable[[int, int], None] = lambda there, wanted: None,
  ):
    """Starts all but the absent and waits until they are ready.

    Args:
      on_start: told how many processes of how many are there.

    Raises:
      RuntimeError: one of them can't start.
    """
    self._launcher = Launcher(workers, spec, absent)
    processes = self._launcher.processes
    self._home = {name: p for p, names in processes.items() for name in names}
    self._spec = spec
    self._changed = threading.Condition()
    self._news: list[tuple[str, News]] = []
    self._woken = False
    self._crash: BaseException | None = None
    self._is_closed = False
    # Who is to be there, and how often each may still be started.
    self._wanted = {*processes} - {*absent}
    self._tries = dict.fromkeys(processes, spec.max_restarts)
    self._owns_ray = join_ray(spec, self._launcher.num_places)
    self._members: dict[str, Member] = {}
    # As of the news taken: what is told to a process is for that process.
    self._known: dict[str, Member] = {}
    self._launching: dict[str, Launched] = {}
    self._starters: dict[str, threading.Thread] = {}
    self._looked_s = time.monotonic()
    try:
      self._start_all(on_start)
    except BaseException:
      self._shut_down()
      raise
    self._thread = threading.Thread(target=self._main, name='crew', daemon=True)
    self._thread.start()

  def _start_all(self, on_start: Callable[[int, int], None]) -> None:
    """Has all that are wanted, those too that an earlier driver left."""
    left = self._launcher.take_over(self._wanted)
    all_launched = {
      process: left.get(process) or self._launcher.launch(process)
      for process in self._launcher.processes
      if process in self._wanted
    }
    for process, launched in all_launched.items():
      self._members[process] = meet(process, launched, self._spec.start_s)
      on_start(len(self._members), len(all_launched))
    self._known = {**self._members}

  @property
  def addresses(self) -> dict[str, Address]:
    """Where the instances listen, of whose processes `take` has told."""
    with self._changed:
      known = [member.addresses for member in self._known.values()]
    return {name: at for each in known for name, at in each.items()}

  def link_uses(self, start_s: float) -> dict[tuple[str, str], LinkUse]:
    """What instances told last of their links in the run that began then."""
    with self._changed:
      told = [each for m in self._members.values() for each in m.last.items()]
    now: dict[tuple[str, str], LinkUse] = {}
    for name, report in told:
      if report.start_s == start_s:
        for (kind, whose), use in report.link_uses.items():
          # Each has its own way to the store that no instance owns.
          link = kind, name if whose == REMOTE else whose
          old = now.get(link, LinkUse(0, 0.0))
          now[link] = LinkUse(
            old.num_bytes + use.num_bytes, old.used_s + use.used_s
          )
    return now

  def tell(self, told: Mapping[str, Sequence[Command]]) -> None:
    """Sends instances commands; one that is no more does not mind."""
    by_process: dict[str, dict[str, Sequence[Command]]] = {}
    for name, commands in told.items():
      by_process.setdefault(self._home[name], {})[name] = commands
    for process, some in by_process.items():
      if (member := self._known.get(process)) is not None:
        member.launched.actor.do.remote(some, self._launcher.driver)

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
    """Calls a method of some instances; those that don't answer lack."""
    refs = {
      name: getattr(member.launched.actor, method).remote(name, *args)
      for name in names
      if (member := self._known.get(self._home[name])) is not None
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
    member = self._known.get(self._home[owner(segment)])
    return [] if member is None else member.left.pop(segment, [])

  @property
  def process_ids(self) -> dict[str, int]:
    """Numbers of the instances' processes on their hosts, as of now."""
    with self._changed:
      return {
        name: member.process_id
        for member in self._members.values()
        for name in member.addresses
      }

  def bring(self, name: str) -> None:
    """Has an instance started that is not there; news tell when it is."""
    process = self._home[name]
    with self._changed:
      self._wanted.add(process)
      self._tries[process] = 1 + self._spec.max_restarts
      if process not in self._members:
        self._begin(process)

  def dismiss(self, name: str) -> None:
    """Ends an instance's process, which is not started again.

    Raises:
      ValueError: others share it.
    """
    process = self._home[name]
    if len(shared := self._launcher.processes[process]) > 1:
      raise ValueError(
        f'{name} shares its process with {len(shared) - 1} others: '
        f'RaySpec.instances_per_process={self._spec.instances_per_process}'
      )
    with self._changed:
      self._wanted.discard(process)
      member = self._members.get(process)
      coming = self._launching.get(process)
    if coming is not None:
      coming.end()  # so that who waits for it hears
    if member is not None:
      self._lose(member, 'was let go')

  def close(self, ends_named: bool = False) -> None:
    """Ends all processes, and Ray if it was started here.

    Those with a name stay for the next driver, unless `ends_named`.
    """
    with self._changed:
      self._is_closed = True
      launching = [*self._launching.values()]
      starters = [*self._starters.values()]
    for launched in launching:
      launched.end()
    for thread in (self._thread, *starters):
      thread.join()
    self._shut_down(ends_named or not self._spec.name)

  def _shut_down(self, ends_all: bool = True) -> None:
    for member in self._members.values():
      if ends_all:
        member.launched.end()
    if self._owns_ray:
      ray.shutdown()

  def _post(self, news: Iterable[tuple[str, News]]) -> None:
    with self._changed:
      self._news += news
      self._changed.notify_all()

  def _main(self) -> None:
    try:
      asked: dict[Any, Member] = {}
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

  def _ask_all(self, asked: dict[Any, Member]) -> None:
    with self._changed:
      silent = {*self._members.values()} - {*asked.values()}
    for member in silent:
      # Nobody has asked it before, however long the others took to start.
      member.heard_s = time.monotonic()
      ref = member.launched.actor.report.remote(
        REPORT_S, self._launcher.driver, self._spec.tokens_wait_s
      )
      asked[ref] = member

  def _hear(self, member: Member, ref: Any) -> None:
    try:
      reports: Any = ray.get(ref)
    except RayError as error:
      self._lose(member, f'was lost: {_short(error)}')
      return
    member.heard_s = time.monotonic()
    member.last |= reports
    for name, report in reports.items():
      if report.is_refused:
        raise RuntimeError(f'another driver has taken over {name}')
      if report.error:
        self._lose(member, f'was lost: {report.error}')
        return
    told = [(name, each) for name, each in reports.items() if each.completions]
    if told:
      self._post(told)

  def _miss_silent(self, asked: dict[Any, Member]) -> None:
    now_s = time.monotonic()
    asleep_s, self._looked_s = now_s - self._looked_s, now_s
    for ref, member in [*asked.items()]:
      if asleep_s > REPORT_S:  # it was not the others who did not answer
        member.heard_s += asleep_s
      silent_s = now_s - member.heard_s
      if silent_s > self._spec.silence_s:
        del asked[ref]
        self._lose(member, f'said nothing for {silent_s:.0f} s')

  def _lose(self, member: Member, why: str) -> None:
    """A process is no more, or may not go on; another one may be started."""
    member.launched.end()
    process = member.process
    with self._changed:
      if self._members.get(process) is not member:
        return  # two have noticed
      del self._members[process]
      lost = {name: f'{name} {why}' for name in member.addresses}
      logging.getLogger(__name__).warning('; '.join(lost.values()))
      self._post((name, Lost(each)) for name, each in lost.items())
      self._begin(process)

  def _begin(self, process: str) -> None:
    """Under the lock: has a thread start it, if it may and none does."""
    if process not in self._starters and process in self._wanted:
      thread = self._starters[process] = threading.Thread(
        target=self._start,
        args=(process,),
        name=f'start {process}',
        daemon=True,
      )
      thread.start()

  def _start(self, process: str) -> None:
    """Starts a process, as often as it may, until it is there."""
    while (launched := self._launch_again(process)) is not None:
      try:
        member = meet(process, launched, self._spec.start_s)
      except RuntimeError:
        continue
      if self._admit(member):
        return

  def _launch_again(self, process: str) -> Launched | None:
    """The next one to try with; None ends the trying."""
    with self._changed:
      self._launching.pop(process, None)
      may_start = process in self._wanted and self._tries[process]
      if self._is_closed or not may_start:
        del self._starters[process]
        return None
      self._tries[process] -= 1
      launched = self._launching[process] = self._launcher.launch(process)
      return launched

  def _admit(self, member: Member) -> bool:
    """Makes it its instances' process, if that is still wanted."""
    process = member.process
    with self._changed:
      if process not in self._wanted:
        member.launched.end()
        return False
      del self._launching[process], self._starters[process]
      self._members[process] = member
      self._post((name, Joined(at)) for name, at in member.addresses.items())
      return True


def _short(error: BaseException) -> str:
  """The first line of an error."""
  return f'{type(error).__name__}: {str(error).partition(chr(10))[0]}'
