# SPDX-License-Identifier: Apache-2.0
"""Completions on their way to `wait`, and which works are under way.

Any thread posts, the loop thread opens works and takes completions. A work
has exactly one completion with `done=True`: later ones are dropped.
"""

from collections.abc import Iterable
import threading

from mooncake_jax.backend import Completion
from mooncake_jax.backend import WorkId

LONGEST_WAIT_S = 60.0  # the caller of `take` asks again


class Inbox:
  """A queue that knows whether anything can still come."""

  def __init__(self):
    self._changed = threading.Condition()
    self._completions: list[Completion] = []
    self._open: set[WorkId] = set()
    self._woken = False
    self._nudged = False
    self._crash: tuple[str, BaseException] | None = None

  @property
  def has_open(self) -> bool:
    return bool(self._open)

  def open(self, work_id: WorkId) -> None:
    """Notes that a work is under way."""
    with self._changed:
      self._open.add(work_id)

  def forget(self, work_id: WorkId) -> None:
    """The work could not start: nothing comes of it."""
    with self._changed:
      self._open.discard(work_id)
      self._completions = [
        each for each in self._completions if each.work_id != work_id
      ]

  def post(self, completion: Completion) -> None:
    """Queues a completion unless its work has ended."""
    with self._changed:
      if completion.work_id not in self._open:
        return
      if completion.done:
        self._open.remove(completion.work_id)
      self._completions.append(completion)
      self._changed.notify()

  def wake(self) -> None:
    """Ends the `take` under way, or the next one, early."""
    with self._changed:
      self._woken = True
      self._changed.notify()

  def nudge(self) -> None:
    """Has the `take` under way return: how long it may wait has changed."""
    with self._changed:
      self._nudged = True
      self._changed.notify()

  def crash(self, thread: str, error: BaseException) -> None:
    """Makes `take` raise: a thread of the backend is no more."""
    with self._changed:
      self._crash = self._crash or (thread, error)
      self._changed.notify()

  def take(self, timeout_s: float) -> tuple[list[Completion], bool]:
    """Waits for completions, in order; also tells whether it was woken.

    Raises:
      RuntimeError: a thread of the backend ended by an error.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._completions or self._woken or self._nudged or self._crash,
        max(0.0, min(timeout_s, LONGEST_WAIT_S)),
      )
      if self._crash:
        thread, error = self._crash
        raise RuntimeError(f'{thread} ended by {describe(error)}') from error
      taken, self._completions = self._completions, []
      woken, self._woken, self._nudged = self._woken, False, False
      return taken, woken


def describe(error: BaseException) -> str:
  """An error in one line: 'Type: message'."""
  message = ' '.join(str(error).split())
  return f'{type(error).__name__}: {message}'


def earliest(times_s: Iterable[float | None]) -> float:
  """The smallest of the times that are given, else infinity."""
  return min((t for t in times_s if t is not None), default=float('inf'))
