# SPDX-License-Identifier: Apache-2.0
"""Asks a store of no instance what it has, on a thread of its own.

One question after another, each given up at its deadline, so with equal
patience none ends much later than its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_jax.backend import Completion
from mooncake_jax.backend import Status
from mooncake_jax.backend import WorkId
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.far import SharedSegment
from mooncake_jax.transfer.worker import Worker


@dataclass(frozen=True)
class Question:
  """A probe; `answer` gets its completion."""

  work_id: WorkId
  keys: tuple[BlockKey, ...]
  deadline_s: float
  answer: Callable[[Completion], None]


class Prober:
  """Answers questions in order."""

  def __init__(
    self,
    store: SharedSegment,
    now_s: Callable[[], float],
    on_crash: Callable[[str, BaseException], None],
  ):
    """Starts the thread; `now_s` is the clock that deadlines are on."""
    self._store = store
    self._now_s = now_s
    self._worker = Worker(f'{store.name}-probe', self._serve, on_crash)

  def ask(self, question: Question) -> None:
    """Queues a question. Any thread may call."""
    self._worker.submit(question, 0)

  def close(self) -> None:
    """Ends the thread after the question under way; drops the others."""
    self._worker.close()

  def _serve(self, questions: list[Question]) -> None:
    for question in questions:
      started_s, status, present, error = self._now_s(), 'completed', 0, ''
      try:
        present = self._present(question, started_s)
      except Exception as why:
        is_late = isinstance(why, TimeoutError)
        status: Status = 'timeout' if is_late else 'failed'
        error = str(why)
      question.answer(
        Completion(
          question.work_id,
          status,
          started_s,
          self._now_s(),
          error,
          present=present,
        )
      )

  def _present(self, question: Question, now_s: float) -> int:
    """How many of the leading blocks are there."""
    left_s = question.deadline_s - now_s
    if left_s <= 0:
      raise TimeoutError(f'{self._store.name}: the probe began too late')
    there = self._store.exists(question.keys, left_s)
    return [*there, False].index(False)
