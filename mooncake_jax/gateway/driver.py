# SPDX-License-Identifier: Apache-2.0
"""The loop in a thread of its own, and what it tells, on the event loop.

One call into the event loop for all that was told since the last one was
taken, not one a token: while clients are written to, more gathers.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
import threading
from typing import Any
from typing import Protocol

from mooncake_jax.arrivals import Command
from mooncake_jax.arrivals import Live
from mooncake_jax.changes import Change
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.events import Event
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.choice import Told
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import too_many
from mooncake_jax.metrics.records import RecordBook
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Decision
from mooncake_jax.serve import serve


class Watcher(Protocol):
  """Who counts what happens: metrics, and what is shown of late."""

  def decided(self, choice: Choice, decision: Decision) -> None: ...

  def ended(self, choice: Choice, record: RequestRecord) -> None: ...


@dataclass(frozen=True)
class _Ask:
  """A question that is answered in the loop's thread."""

  question: Callable[[Cluster], Any]
  answer: 'asyncio.Future[Any]'
  events: asyncio.AbstractEventLoop

  def happen(self, cluster: Cluster) -> None:
    try:
      value = self.question(cluster)
    except Exception as error:  # its asker's, not the loop's
      self.events.call_soon_threadsafe(self._tell, None, error)
    else:
      self.events.call_soon_threadsafe(self._tell, value)

  def _tell(self, value: Any, error: Exception | None = None) -> None:
    if self.answer.done():
      return
    if error is None:
      self.answer.set_result(value)
    else:
      self.answer.set_exception(error)


class Driver:
  """Submits and cancels; its methods are called on the event loop.

  Attributes:
    events: the event loop, once started.
    book: records of what is under way; to be read in the loop's thread.
    error: what ended the loop, if anything did.
    is_draining: no more requests are taken.
  """

  def __init__(
    self,
    cluster: Cluster,
    conductor: Conductor,
    max_open: int,
    watchers: Iterable[Watcher] = (),
  ):
    """Made with an idle cluster; `start` begins to serve.

    Args:
      max_open: requests under way; more are refused with 429.
    """
    self.cluster = cluster
    self.conductor = conductor
    self.book = RecordBook()
    self.error: BaseException | None = None
    self.is_draining = False
    self._max_open = max_open
    self._watchers = tuple(watchers)
    self._choices: dict[str, Choice] = {}
    self._live = Live(cluster.backend.wake)
    self._told: deque[Told | TokensEmitted] = deque()
    self._is_due = False
    self._ended = asyncio.Event()
    self._thread = threading.Thread(target=self._run, name='serve', daemon=True)

  def start(self) -> None:
    self.events = asyncio.get_running_loop()
    self._thread.start()

  @property
  def request_timeout_s(self) -> float:
    """The cluster's own deadline of a request."""
    return self.cluster.spec.request_timeout_s

  @property
  def num_open(self) -> int:
    """Requests under way."""
    return len(self._choices)

  def check(self, num_choices: int) -> None:
    """Whether so many more may be submitted.

    Raises:
      ApiError: 429 where too many are under way, 503 where none will be.
    """
    if self.error is not None or self.is_draining:
      raise stopping()
    if len(self._choices) + num_choices > self._max_open:
      raise too_many('The server has too much to do.', 'server_busy', 1.0)

  def submit(self, choice: Choice, came_s: float | None = None) -> None:
    """Begins a request; its choice hears what becomes of it.

    Args:
      came_s: see `Live.post`.
    """
    self._choices[choice.request.request_id] = choice
    self._live.post(choice.request, came_s)

  def cancel(self, choice: Choice) -> None:
    """Ends a request that nobody waits for any more."""
    name = choice.request.request_id
    if name in self._choices and self.error is None:
      self.post(Change(0.0, 'cancel', name))

  def post(self, command: Command) -> None:
    """Something else to be done, in the loop's thread."""
    self._live.post(command)

  async def ask(
    self, question: Callable[[Cluster], Any], timeout_s: float = 5.0
  ) -> Any:
    """What a function of the cluster gives, called in the loop's thread.

    Raises:
      ApiError: 503, the loop has ended or is too busy.
    """
    if self.error is not None or self._ended.is_set():
      raise stopping()
    answer = self.events.create_future()
    self.post(_Ask(question, answer, self.events))
    try:
      return await asyncio.wait_for(answer, timeout_s)
    except TimeoutError:
      raise ApiError(503, 'The server is too busy.', 'busy') from None

  def drain(self) -> None:
    """Takes no more requests; those under way go on."""
    self.is_draining = True

  async def stop(self, timeout_s: float) -> bool:
    """Ends the loop: what is under way is cancelled, to the last page.

    Returns:
      Whether it ended in time.
    """
    self.drain()
    for choice in [*self._choices.values()]:
      self.cancel(choice)
    self._live.close()
    try:
      await asyncio.wait_for(self._ended.wait(), timeout_s)
    except TimeoutError:
      return False
    return True

  # In the loop's thread.

  def _run(self) -> None:
    error: BaseException | None = None
    try:
      serve(
        self._live,
        self.conductor,
        self.cluster,
        on_event=self._on_event,
        keeps_journal=False,
        on_decision=self._tell,
        on_record=self._tell,
        book=self.book,
      )
    except BaseException as caught:  # told to whoever waits, then raised again
      error = caught
      raise
    finally:
      self.events.call_soon_threadsafe(self._over, error)

  def _on_event(self, event: Event) -> None:
    if isinstance(event, TokensEmitted | PrefixFetched):
      self._tell(event)

  def _tell(self, told: Told | TokensEmitted) -> None:
    self._told.append(told)
    if not self._is_due:
      self._is_due = True
      self.events.call_soon_threadsafe(self._hear)

  # On the event loop.

  def _hear(self) -> None:
    """Hands on all that was told."""
    self._is_due = False  # first: what comes from here on calls again
    told_of, choices = self._told, self._choices
    while told_of:
      told = told_of.popleft()
      if isinstance(told, TokensEmitted):
        for row in told.emitted.rows:
          if choice := choices.get(row.request_id):
            choice.hear(row)
        continue
      choice = choices.get(told.request_id)
      if choice is None:
        continue
      choice.hear(told)
      if isinstance(told, Decision):
        for watcher in self._watchers:
          watcher.decided(choice, told)
      elif isinstance(told, RequestRecord):
        del choices[told.request_id]
        if choice.finish_reason is not None:
          # A stop string ended the answer; the cancel was our own.
          told.outcome, told.reason = 'completed', ''
        for watcher in self._watchers:
          watcher.ended(choice, told)

  def _over(self, error: BaseException | None) -> None:
    """The loop has ended; nobody waits for it any longer."""
    self._hear()
    self.error = error
    self._ended.set()
    for choice in [*self._choices.values()]:
      choice.fail(stopping())
    self._choices.clear()


def stopping() -> ApiError:
  return ApiError(503, 'The server is stopping.', 'stopping')
