# SPDX-License-Identifier: Apache-2.0
"""The owner: one thread an instance, the only one that touches its pool.

It runs what is posted in order: gathers, scatters, and the beginning of a
decode work. Chunks of prefill go on beside, in their own order, a layer group
a turn and only when nothing else is posted: copies go out ahead of the next
group, and a chunk that waits for its prefix holds up no copy and no decode
step, only the chunks behind it. Between two steps
of a decode work it takes a turn of at most `TASKS_A_TURN` tasks and one group.

An instance on the same devices may share the owner (`share`). Then a program
of one waits for those of the other: devices with a queue of their own see to
that, a CPU would run them at once.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from functools import partial
import heapq
import itertools
import threading
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax

from mooncake_jax.engine.decode_run import DecodeRun
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tasks import GatherTask
from mooncake_jax.engine.tasks import Task

TASKS_A_TURN = 16


class PipeRun(Protocol):
  """A chunk that is given to a pipe."""

  @property
  def writes(self) -> set[int]:
    """The pages it writes."""
    ...

  @property
  def is_open(self) -> bool:
    """Whether there is more to dispatch."""
    ...


class Pipe(Protocol):
  """Chunks in the order given, as far as they are not dispatched."""

  @property
  def runs(self) -> Iterable[PipeRun]: ...

  def add(self, run: Any) -> None: ...

  def advance(self) -> bool:
    """Dispatches the next program if one may start now."""
    ...


Posted = tuple[Task | DecodeTask, Desk] | PipeRun


class _Gather(NamedTuple):
  """A gather held back; those of lower priority value first.

  Attributes:
    earlier: chunks begun before it that write its pages.
  """

  priority: int
  order: int
  task: GatherTask
  desk: Desk
  earlier: Sequence[PipeRun]


class Owner:
  """Runs tasks of one instance on a thread of its own."""

  def __init__(
    self,
    name: str,
    desk: Desk,
    pipe: Pipe,
    on_crash: Callable[[str, BaseException], None],
  ):
    """Starts the thread.

    Args:
      desk: where tasks go that name no other.
      pipe: where it puts chunks.
      on_crash: called if the thread itself fails.
    """
    self._name = name
    self._desk = desk
    self._pools = [desk.pool]
    self._on_crash = on_crash
    self._changed = threading.Condition()
    self._queue: deque[Posted] = deque()
    self._is_poked = False
    self._is_closed = False
    # The rest belongs to the owner thread.
    self._decode: DecodeRun | None = None
    self._pipe = pipe
    self._gathers: list[_Gather] = []
    self._order = itertools.count()
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def share(self, desk: Desk) -> None:
    """Serves another instance as well, before that has any work."""
    self._pools.append(desk.pool)

  def post(self, task: Task | DecodeTask, desk: Desk | None = None) -> None:
    """Queues a task. Any thread may call."""
    with self._changed:
      self._queue.append((task, desk or self._desk))
      self._changed.notify()

  def post_chunk(self, run: PipeRun) -> None:
    """Queues a chunk for the pipe. Any thread may call."""
    with self._changed:
      self._queue.append(run)
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
      with jax.set_mesh(self._desk.pool.mesh):
        while (tasks := self._take()) is not None:
          for posted in tasks:
            if isinstance(posted, tuple):
              self._run(*posted)
            else:
              self._pipe.add(posted)
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

  def _run(self, task: Task | DecodeTask, desk: Desk) -> None:
    if isinstance(task, GatherTask):
      earlier = self._writers(task, desk)
      entry = _Gather(task.priority, next(self._order), task, desk, earlier)
      heapq.heappush(self._gathers, entry)
      self._run_gathers()
    elif isinstance(task, DecodeTask):
      self._try(task, desk, lambda: self._begin_decode(task, desk))
    else:
      self._try(task, desk, lambda: task.run(desk))

  def _try(
    self, task: Task | DecodeTask, desk: Desk, run: Callable[[], None]
  ) -> None:
    """Runs it on the stage's mesh; what raises fails the task."""
    try:
      desk.pool.check()
      with self._on(desk.pool):
        run()
    except Exception as error:
      task.fail(error)

  def _on(self, pool: StagePool) -> AbstractContextManager[Any]:
    """Makes the pool's mesh the current one."""
    if pool.mesh is self._desk.pool.mesh:
      return nullcontext()
    return jax.set_mesh(pool.mesh)

  def _wait_for_others(self, pool: StagePool) -> None:
    """Until a CPU has done what was dispatched on other pools."""
    for other in self._pools:
      if other is not pool and other.can_copy_now:
        jax.block_until_ready(other.kv)

  def _writers(self, task: GatherTask, desk: Desk) -> list[PipeRun]:
    """Chunks begun before it, and not yet dispatched, that write its pages."""
    if task.is_released or desk.pool.spec is not self._desk.pool.spec:
      return []
    pages = set(task.pages)
    return [run for run in self._pipe.runs if not run.writes.isdisjoint(pages)]

  def _advance_chunk(self) -> None:
    """Dispatches a program of the pipe once nothing else is to be done."""
    if self._queue:
      return
    if any(True for _ in self._pipe.runs):
      self._wait_for_others(self._desk.pool)
    if self._pipe.advance():
      self.poke()  # there may be more, and gathers may have waited for it

  def _begin_decode(self, task: DecodeTask, desk: Desk) -> None:
    if self._decode is not None:
      raise ValueError(
        f'decode work {task.work_id} while {self._decode.task.work_id} runs'
      )
    if desk.model is None:
      raise ValueError(f'{self._name} only prefills')
    self._decode = DecodeRun(task, desk.model)

  def _advance_decode(self) -> None:
    run = self._decode
    if run is None:
      return
    try:
      run.pool.check()
      self._wait_for_others(run.pool)
      with self._on(run.pool):
        is_open = run.advance()
    except Exception as error:
      run.task.fail(error)
      is_open = False
    if not is_open:
      self._decode = None
      self.poke()  # gathers may have waited for its end

  def _run_gathers(self) -> None:
    """Dispatches gathers by priority while staging bytes are free."""
    waiting: list[_Gather] = []
    while self._gathers:
      entry = heapq.heappop(self._gathers)
      task, desk = entry.task, entry.desk
      if not task.is_live():
        continue
      is_early = any(run.is_open for run in entry.earlier)
      if is_early or self._is_written(task, desk):
        waiting.append(entry)
      elif desk.staging.try_take(task.num_bytes):
        self._try(task, desk, partial(task.run, desk))
      else:
        waiting.append(entry)
        break
    for entry in waiting:
      heapq.heappush(self._gathers, entry)

  def _is_written(self, task: GatherTask, desk: Desk) -> bool:
    """Whether the decode work under way writes the pages."""
    decode = self._decode
    if decode is None or decode.pool is not desk.pool:
      return False
    return not decode.writes.isdisjoint(task.pages)
