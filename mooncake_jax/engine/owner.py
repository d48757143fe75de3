# SPDX-License-Identifier: Apache-2.0
"""The owner: one thread an instance, the only one that touches its pool.

It runs what is posted in order: prefill chunks, gathers, scatters, and the
beginning of a decode work. Between two steps of a decode work it runs what
has been posted meanwhile, at most `TASKS_A_TURN` tasks and one chunk, so
neither holds the other up for long.
"""

from collections import deque
from collections.abc import Callable
import heapq
import itertools
import threading

import jax

from mooncake_jax.engine.decode_run import DecodeRun
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tasks import GatherTask
from mooncake_jax.engine.tasks import PrefillTask
from mooncake_jax.engine.tasks import Task

TASKS_A_TURN = 16


class Owner:
  """Runs tasks of one instance on a thread of its own."""

  def __init__(
    self,
    name: str,
    desk: Desk,
    on_crash: Callable[[str, BaseException], None],
  ):
    """Starts the thread; `on_crash` is called if the thread itself fails."""
    self._name = name
    self._desk = desk
    self._on_crash = on_crash
    self._changed = threading.Condition()
    self._queue: deque[Task | DecodeTask] = deque()
    self._is_poked = False
    self._is_closed = False
    # The rest belongs to the owner thread.
    self._decode: DecodeRun | None = None
    self._gathers: list[tuple[int, int, GatherTask]] = []
    self._order = itertools.count()
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def post(self, task: Task | DecodeTask) -> None:
    """Queues a task. Any thread may call."""
    with self._changed:
      self._queue.append(task)
      self._changed.notify()

  def poke(self) -> None:
    """Says that staging bytes came free. Any thread may call."""
    with self._changed:
      self._is_poked = True
      self._changed.notify()

  def close(self) -> None:
    """Ends the thread after the task under way; drops the others."""
    with self._changed:
      self._is_closed = True
      self._changed.notify()
    self._thread.join()

  def _main(self) -> None:
    try:
      with jax.set_mesh(self._desk.model.mesh):
        while (tasks := self._take()) is not None:
          for task in tasks:
            self._run(task)
          self._run_gathers()
          self._advance_decode()
    except BaseException as error:
      self._on_crash(self._name, error)

  def _take(self) -> list[Task | DecodeTask] | None:
    """Waits until there is something to do; None once closed."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._queue or self._decode or self._is_poked or self._is_closed
      )
      if self._is_closed:
        return None
      self._is_poked = False
      tasks: list[Task | DecodeTask] = []
      while self._queue and len(tasks) < TASKS_A_TURN:
        tasks.append(self._queue.popleft())
        if isinstance(tasks[-1], PrefillTask):
          break
      return tasks

  def _run(self, task: Task | DecodeTask) -> None:
    if isinstance(task, GatherTask):
      heapq.heappush(self._gathers, (task.priority, next(self._order), task))
      self._run_gathers()  # before the next chunk keeps the devices busy
      return
    try:
      self._check_pool()
      if isinstance(task, DecodeTask):
        self._begin_decode(task)
      else:
        task.run(self._desk)
    except Exception as error:
      task.fail(error)

  def _check_pool(self) -> None:
    """Raises once the pool is gone: a program failed that was given it."""
    if self._desk.model.is_lost:
      raise RuntimeError(f'{self._name} lost its KV pool')

  def _begin_decode(self, task: DecodeTask) -> None:
    if self._decode is not None:
      raise ValueError(
        f'decode work {task.work_id} while {self._decode.task.work_id} runs'
      )
    self._decode = DecodeRun(task, self._desk.model)

  def _advance_decode(self) -> None:
    run = self._decode
    if run is None:
      return
    try:
      self._check_pool()
      is_open = run.advance()
    except Exception as error:
      run.task.fail(error)
      is_open = False
    if not is_open:
      self._decode = None
      self.poke()  # gathers may have waited for its end

  def _run_gathers(self) -> None:
    """Dispatches gathers by priority while staging bytes are free."""
    waiting: list[tuple[int, int, GatherTask]] = []
    while self._gathers:
      entry = heapq.heappop(self._gathers)
      task = entry[2]
      if not task.is_live():
        continue
      if self._is_written(task):
        waiting.append(entry)
      elif self._desk.staging.try_take(task.num_bytes):
        self._dispatch(task)
      else:
        waiting.append(entry)
        break
    for entry in waiting:
      heapq.heappush(self._gathers, entry)

  def _is_written(self, task: GatherTask) -> bool:
    """Whether the decode work under way writes the pages."""
    return self._decode is not None and not self._decode.writes.isdisjoint(
      task.pages
    )

  def _dispatch(self, task: GatherTask) -> None:
    try:
      self._check_pool()
      task.run(self._desk)
    except Exception as error:
      task.fail(error)
