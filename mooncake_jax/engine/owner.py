# SPDX-License-Identifier: Apache-2.0
"""The owner: one thread an instance, the only one that touches its pool.

It runs what is posted in order: gathers, scatters, and the beginning of a
decode work. Chunks of prefill go on beside, in their own order, a layer group
a turn and only when nothing else is posted: copies go out ahead of the next
group, and a chunk that waits for its prefix holds nobody up. Between two steps
of a decode work it takes a turn of at most `TASKS_A_TURN` tasks and one group.
"""

from collections import deque
from collections.abc import Callable
import heapq
import itertools
import threading

import jax

from mooncake_jax.engine.chunk_run import StageRun
from mooncake_jax.engine.decode_run import DecodeRun
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tasks import GatherTask
from mooncake_jax.engine.tasks import Task

TASKS_A_TURN = 16

Posted = Task | DecodeTask | StageRun


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
    self._queue: deque[Posted] = deque()
    self._is_poked = False
    self._is_closed = False
    # The rest belongs to the owner thread.
    self._decode: DecodeRun | None = None
    self._chunks: deque[StageRun] = deque()
    self._gathers: list[tuple[int, int, GatherTask, list[StageRun]]] = []
    self._order = itertools.count()
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def post(self, task: Posted) -> None:
    """Queues a task. Any thread may call."""
    with self._changed:
      self._queue.append(task)
      self._changed.notify()

  def poke(self) -> None:
    """Makes it look again what may go on. Any thread may call."""
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
          self._advance_chunk()
          self._advance_decode()
    except BaseException as error:
      self._on_crash(self._name, error)

  def _take(self) -> list[Posted] | None:
    """Waits until there is something to do; None once closed."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._queue or self._decode or self._is_poked or self._is_closed
      )
      if self._is_closed:
        return None
      self._is_poked = False
      tasks: list[Posted] = []
      while self._queue and len(tasks) < TASKS_A_TURN:
        tasks.append(self._queue.popleft())
      return tasks

  def _run(self, task: Posted) -> None:
    if isinstance(task, StageRun):
      self._chunks.append(task)
      return
    if isinstance(task, GatherTask):
      order, earlier = next(self._order), self._writers(task)
      heapq.heappush(self._gathers, (task.priority, order, task, earlier))
      self._run_gathers()
      return
    try:
      self._desk.model.check_pool()
      if isinstance(task, DecodeTask):
        self._begin_decode(task)
      else:
        task.run(self._desk)
    except Exception as error:
      task.fail(error)

  def _writers(self, task: GatherTask) -> list[StageRun]:
    """Chunks begun before it, and not yet dispatched, that write its pages."""
    if task.is_released:
      return []
    pages = set(task.pages)
    return [run for run in self._chunks if not run.writes.isdisjoint(pages)]

  def _advance_chunk(self) -> None:
    """Dispatches the next layer group once nothing else is to be done."""
    self._chunks = deque(run for run in self._chunks if run.is_open)
    if not self._chunks or self._queue or not self._chunks[0].advance():
      return
    self.poke()  # there may be more, and gathers may have waited for it

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
      self._desk.model.check_pool()
      is_open = run.advance()
    except Exception as error:
      run.task.fail(error)
      is_open = False
    if not is_open:
      self._decode = None
      self.poke()  # gathers may have waited for its end

  def _run_gathers(self) -> None:
    """Dispatches gathers by priority while staging bytes are free."""
    waiting: list[tuple[int, int, GatherTask, list[StageRun]]] = []
    while self._gathers:
      entry = heapq.heappop(self._gathers)
      _, _, task, earlier = entry
      if not task.is_live():
        continue
      if any(run.is_open for run in earlier) or self._is_written(task):
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
      self._desk.model.check_pool()
      task.run(self._desk)
    except Exception as error:
      task.fail(error)
