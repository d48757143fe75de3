# SPDX-License-Identifier: Apache-2.0
"""One decode work on its owner thread: dispatch ahead, read, report.

Step t + 1 is dispatched before the tokens of step t are read: they feed back
on the devices.

    dispatch 1, dispatch 2, read 1, dispatch 3, read 2, ...

After a row's end or a cancel no step is dispatched; the one under way is read
and reported, not thrown away. A row that ended at step t is computed in step
t + 1 too: that writes its own pages only, and nobody hears of it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import WorkId
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.model import logprobs
from mooncake_jax.request import Emitted
from mooncake_jax.request import TokenLogprobs
from mooncake_jax.request import TokenSegment

# Steps dispatched and unread, at most.
RUN_AHEAD = 2


@dataclass(eq=False)
class DecodeTask:
  """A decode work as the loop thread handed it in."""

  work_id: WorkId
  batch: DecodeBatch
  max_steps: int
  now_s: Callable[[], float]
  post: Callable[[Completion], None]
  is_cancelled: bool = False

  def cancel(self) -> None:
    """Ends it at the next step boundary. Any thread."""
    self.is_cancelled = True

  def fail(self, error: Exception) -> None:
    """Ends the work as 'failed'."""
    now_s = self.now_s()
    self.post(Completion(self.work_id, 'failed', now_s, now_s, describe(error)))


class DecodeRun:
  """A decode work that has begun. Owner thread only.

  Attributes:
    pool: that it decodes in.
    writes: pages of it that its steps may write.
  """

  def __init__(self, task: DecodeTask, model: MeshModel):
    """Puts the batch on the devices; raises ValueError if it can't run."""
    rows = task.batch.rows
    if not rows or task.max_steps < 1:
      raise ValueError(f'decode of {len(rows)=} with {task.max_steps=}')
    self.task = task
    self.pool = model.pool
    self._model = model
    self._started_s = task.now_s()
    self._state = model.batch(rows)
    self._fewest = min(row.remaining for row in rows)
    self._num_left = min(task.max_steps, self._fewest)
    self._open_rows = list(enumerate(rows))
    self._tries = task.batch.tries
    self._tells_logprobs = any(r.sampling.logprobs is not None for r in rows)
    self._num_read = 0
    self._stops = frozenset().union(*(row.stop_token_ids for row in rows))
    self._unread: deque[jax.Array] = deque()
    first = [row.position // model.pool.page_tokens for row in rows]
    self.writes = {p for row, i in zip(rows, first) for p in row.pages[i:]}

  def advance(self) -> bool:
    """Dispatches a step and reads the one before; False once it has ended."""
    if self._goes_on:
      self._dispatch()
    if len(self._unread) == RUN_AHEAD or not self._goes_on:
      self._read()
    return self._is_open

  @property
  def _goes_on(self) -> bool:
    """Whether another step is to be dispatched."""
    return self._num_left > 0 and not self.task.is_cancelled

  @property
  def _is_open(self) -> bool:
    return bool(self._unread) or self._goes_on

  def _dispatch(self) -> None:
    self._state, report_BR = self._model.step(self._state)
    self._unread.append(report_BR)
    self._num_left -= 1

  def _read(self) -> None:
    """Waits for the oldest unread step and reports its tokens."""
    task, steps = self.task, ()
    unread = np.asarray(self._unread.popleft()) if self._unread else None
    now_s = task.now_s()
    if unread is not None:
      steps = (self._emitted(unread, now_s),)
    done = not self._is_open
    task.post(
      Completion(
        task.work_id,
        'completed',
        self._started_s,
        now_s,
        steps=steps,
        done=done,
      )
    )

  def _emitted(self, report_BR: np.ndarray, now_s: float) -> Emitted:
    """What the rows that had not ended emitted; ends those it ends."""
    tokens = logprobs.tokens(report_BR).tolist()
    likely = self._logprobs(report_BR) if self._tells_logprobs else ()
    segment = TokenSegment(now_s, 0.0, 1)
    open_rows = self._open_rows
    if len(open_rows) == len(self.task.batch.rows):
      # Not row by row: each would be read from memory, not from a cache.
      told = tuple(tokens[: len(open_rows)])
    else:
      told = tuple([tokens[i] for i, _ in open_rows])
    emitted = Emitted(self._tries, segment, told, likely)
    self._num_read += 1
    self._end(tokens)
    return emitted

  def _logprobs(
    self, report_BR: np.ndarray
  ) -> tuple[TokenLogprobs | None, ...]:
    asked = [(i, row.sampling.logprobs) for i, row in self._open_rows]
    return tuple(
      None if count is None else logprobs.of_row(report_BR[i], count)
      for i, count in asked
    )

  def _end(self, tokens: list[int]) -> None:
    """Ends rows that these were the last tokens of; then no step follows."""
    num_rows, num_read = len(self._open_rows), self._num_read
    if num_read < self._fewest and self._stops.isdisjoint(tokens):
      return
    self._open_rows = [
      (i, row)
      for i, row in self._open_rows
      if num_read < row.remaining and tokens[i] not in row.stop_token_ids
    ]
    if len(self._open_rows) < num_rows:
      self._num_left = 0
      open_rows = tuple(row for _, row in self._open_rows)
      self._tries = DecodeBatch(open_rows).tries
