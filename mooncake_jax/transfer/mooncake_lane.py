# SPDX-License-Identifier: Apache-2.0
"""A lane: one thread that calls the store, many blocks in one call.

Calls into the store block, for half a minute if its master hangs, and get
slower when threads share a client. So one thread puts, one gets, each takes
all that waits into one call, and who asked waits on a future no longer than
its deadline. A call that hangs keeps its slots: nobody else writes there.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field
import threading
import time

import numpy as np

from mooncake_jax.transfer.mooncake_errors import FULL
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable

RETRY_S = 0.005  # the store evicts every 10 ms


@dataclass(eq=False)
class Job:
  """One block's share of a call.

  Attributes:
    run: makes one call for many jobs; returns a code each, < 0 an error.
    slot: the bytes to be put or filled; empty where none are moved.
    deadline_s: by `time.monotonic`.
    future: gets the code.
  """

  run: Callable[[list['Job']], list[int]]
  key: str
  slot: np.ndarray
  deadline_s: float
  future: Future[int] = field(default_factory=Future)

  def result(self) -> int:
    """Waits for the code.

    Raises:
      StoreTimeout: it did not come by the deadline.
    """
    try:
      return self.future.result(max(self.deadline_s - time.monotonic(), 0.0))
    except TimeoutError as error:
      self.future.cancel()
      if isinstance(error, StoreTimeout):
        raise
      raise StoreTimeout(
        f'block {self.key}: no answer by its deadline'
      ) from None


class Lane:
  """Runs jobs in order, those of one `run` together."""

  def __init__(self, name: str, max_batch: int):
    """Starts the thread."""
    self._max_batch = max_batch
    self._changed = threading.Condition()
    self._queue: deque[Job] = deque()
    self._closed = False
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def submit(self, job: Job) -> None:
    with self._changed:
      if self._closed:
        raise StoreUnreachable(f'block {job.key}: the segment is closed')
      self._queue.append(job)
      self._changed.notify()

  def close(self, timeout_s: float) -> bool:
    """Fails what waits; returns whether the thread ended in time."""
    with self._changed:
      self._closed = True
      left, self._queue = list(self._queue), deque()
      self._changed.notify()
    for job in left:
      _fail(job, StoreUnreachable(f'block {job.key}: the segment was closed'))
    self._thread.join(timeout_s)
    return not self._thread.is_alive()

  def _main(self) -> None:
    while batch := self._next_batch():
      self._call(batch)
      del batch  # else its slots stay taken until the next call

  def _next_batch(self) -> list[Job]:
    """Waits for jobs nobody gave up; empty once closed."""
    with self._changed:
      while True:
        self._changed.wait_for(lambda: self._queue or self._closed)
        if self._closed:
          return []
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < self._max_batch:
          if not _may_join(self._queue[0], batch):
            break
          batch.append(self._queue.popleft())
        if live := [job for job in batch if _is_wanted(job)]:
          return live

  def _call(self, batch: list[Job]) -> None:
    try:
      codes = batch[0].run(batch)
    except Exception as error:
      for job in batch:
        job.future.set_exception(error)
      return
    again = []
    now_s = time.monotonic()
    for job, code in zip(batch, codes, strict=True):
      if code == FULL and now_s + 2 * RETRY_S < job.deadline_s:
        again.append(job)
      else:
        job.future.set_result(code)
    if again:
      time.sleep(RETRY_S)
      self._retry(again)

  def _retry(self, jobs: list[Job]) -> None:
    with self._changed:
      closed = self._closed
      if not closed:
        self._queue.extend(jobs)
    if closed:
      for job in jobs:
        job.future.set_result(FULL)


def _may_join(job: Job, batch: list[Job]) -> bool:
  """Whether a job can go in the same call.

  Never twice the same key: a get would fill one of the two slots and say that
  it filled both (seen in 0.3.13.post1).
  """
  return job.run == batch[0].run and all(job.key != j.key for j in batch)


def _is_wanted(job: Job) -> bool:
  """Marks a job as running unless it was given up or comes too late."""
  if job.future.running():
    return True  # tried again
  if not job.future.set_running_or_notify_cancel():
    return False
  if time.monotonic() < job.deadline_s:
    return True
  job.future.set_exception(StoreTimeout(f'block {job.key}: began too late'))
  return False


def _fail(job: Job, error: Exception) -> None:
  if job.future.running() or job.future.set_running_or_notify_cancel():
    job.future.set_exception(error)
