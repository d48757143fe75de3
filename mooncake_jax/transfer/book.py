# SPDX-License-Identifier: Apache-2.0
"""The book of transfers under way: what waits for what, and how it ended.

An op starts when the ops begun before it that write its source, or its
destination, have ended. It ends exactly once; who holds a part of it asks
`is_live` before it writes anything, so nothing is written on behalf of an op
whose end was reported. Any thread may call; one lock guards all.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import itertools
import threading

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.op_run import TransferWork
from mooncake_jax.transfer.worker import LinkCount


class TransferBook:
  """Transfers from their submission to the end of their last op."""

  def __init__(
    self,
    now_s: Callable[[], float],
    start: Callable[[Sequence[OpRun]], None],
    ended: Callable[[TransferWork], None],
  ):
    """Makes an empty book.

    Args:
      now_s: the clock that deadlines are on.
      start: called with ops that may start now, once for each.
      ended: called once for a work whose ops have all ended.
    """
    self._now_s = now_s
    self._start = start
    self._ended = ended
    self._lock = threading.RLock()
    self._works: dict[WorkId, TransferWork] = {}
    self._writers: dict[object, list[OpRun]] = defaultdict(list)

  def add(self, work: TransferWork) -> None:
    """Enters a work and starts those of its ops that wait for nothing."""
    with self._lock:
      work.num_live = len(work.runs)
      for run in work.runs:
        self._enter(run)
      if work.runs:
        self._works[work.work_id] = work
    if not work.runs:
      self._ended(work)
    self.expire()
    self._start_ready(work.runs)

  def begin(self, run: OpRun) -> bool:
    """Marks that its bytes are being moved; False if it has ended."""
    with self._lock:
      now_s = self._now_s()
      if run.is_live and now_s <= run.work.deadline_s:
        run.is_moving = True
        if run.work.started_s is None:
          run.work.started_s = now_s
        return True
    self._time_out(run)
    return False

  def begin_all(self, runs: Iterable[OpRun]) -> list[OpRun]:
    """`begin` for each; those for which it is true."""
    begun, late = [], []
    with self._lock:
      now_s = self._now_s()
      for run in runs:
        if run.is_live and now_s <= run.work.deadline_s:
          run.is_moving = True
          if run.work.started_s is None:
            run.work.started_s = now_s
          begun.append(run)
        else:
          late.append(run)
    for run in late:
      self._time_out(run)
    return begun

  def add_pieces(self, run: OpRun, count: int) -> None:
    """A piece under way goes on as so many more than one."""
    with self._lock:
      run.num_pieces += count

  def piece_arrived(self, run: OpRun, num_bytes: int) -> None:
    """Counts a piece; the last one completes the op."""
    with self._lock:
      run.num_pieces -= 1
      run.moved_bytes += num_bytes
      if run.num_pieces:
        return
      in_time = self._now_s() <= run.work.deadline_s
    if in_time:
      self.end(run, 'completed')
    else:
      self._time_out(run)

  def commit(
    self, run: OpRun, write: Callable[[], None], num_bytes: int
  ) -> bool:
    """Calls `write` for one piece unless the op has ended, in one stroke.

    A quick write only: nothing in the book moves meanwhile. Returns whether
    it was called.
    """
    with self._lock:
      if not run.is_live:
        return False
      write()
    self.piece_arrived(run, num_bytes)
    return True

  def commit_all(
    self,
    pieces: Iterable[tuple[OpRun, Callable[[], None], int]],
    arrived: Callable[[LinkCount], None],
  ) -> None:
    """`commit` for pieces that came together, counted before anybody hears.

    A `write` that raises fails its op.
    """
    ready: list[OpRun] = []
    ended: list[TransferWork] = []
    completed: list[OpRun] = []
    num_bytes = num_arrived = 0
    with self._lock:
      now_s = self._now_s()
      for run, write, size in pieces:
        if not run.is_live:
          continue
        try:
          write()
        except Exception as error:
          self._end(run, 'failed', str(error), ready, ended)
          continue
        run.num_pieces -= 1
        run.moved_bytes += size
        num_bytes, num_arrived = num_bytes + size, num_arrived + 1
        if run.num_pieces:
          continue
        if now_s <= run.work.deadline_s:
          self._end(run, 'completed', '', ready, ended)
          completed.append(run)
        else:
          self._end(run, 'timeout', _late(run), ready, ended)
    arrived(LinkCount(num_bytes, num_arrived))
    self._tell(completed, ready, ended)

  def end(self, run: OpRun, status: Status, error: str = '') -> None:
    """Ends an op and what reads it if it failed; ignored if it has ended."""
    ready: list[OpRun] = []
    ended: list[TransferWork] = []
    with self._lock:
      completed = [run] if run.is_live and status == 'completed' else []
      self._end(run, status, error, ready, ended)
    self._tell(completed, ready, ended)

  def expire(self) -> None:
    """Ends what is past its deadline as 'timeout'."""
    with self._lock:
      now_s = self._now_s()
      late = [w for w in self._works.values() if w.deadline_s < now_s]
    for work in late:
      for run in work.runs:
        self._time_out(run)

  def next_deadline_s(self) -> float | None:
    """The earliest deadline of a work under way."""
    with self._lock:
      return min((w.deadline_s for w in self._works.values()), default=None)

  def cancel(self, work_id: WorkId) -> None:
    """Ends the work's ops that nobody has begun to move."""
    with self._lock:
      work = self._works.get(work_id)
    for run in work.runs if work else ():
      if not run.is_moving:
        self.end(run, 'cancelled', 'cancelled')

  def fail_writers(self, replicas: Iterable[Replica]) -> None:
    """Ends the ops that are writing these replicas: they were dropped."""
    with self._lock:
      runs = [run for r in replicas for run in self._writers.get(r, ())]
    for run in runs:
      self.end(run, 'failed', f'{run.op.dst} was dropped')

  def _enter(self, run: OpRun) -> None:
    """Finds what the op waits for, then enters it as a writer itself."""
    writers = self._writers
    run.places = _places(run.op.dst)
    if writers:
      reads = self._earlier(run, _places(run.op.src))
      writes = self._earlier(run, run.places)
      for earlier in reads | writes:
        earlier.dependents.append((run, earlier in reads))
        run.num_waits += 1
    for place in run.places:
      writers[place].append(run)

  def _earlier(self, run: OpRun, places: Iterable[object]) -> set[OpRun]:
    found: set[OpRun] = set()
    for place in places:
      for writer in self._writers.get(place, ()):
        if _same_layers(writer.op, run.op):
          found.add(writer)
    return found

  def _start_ready(self, runs: Iterable[OpRun]) -> None:
    with self._lock:
      ready = [
        run
        for run in runs
        if run.is_live and not run.num_waits and not run.is_started
      ]
      for run in ready:
        run.is_started = True
    if ready:
      self._start(ready)

  def _tell(
    self,
    completed: Iterable[OpRun],
    ready: Iterable[OpRun],
    ended: Iterable[TransferWork],
  ) -> None:
    """Says what came of ends; the lock is not held."""
    for work, runs in itertools.groupby(completed, lambda run: run.work):
      if work.ops_completed:
        work.ops_completed([run.op for run in runs])
    for work in ended:
      self._ended(work)
    self._start_ready(ready)

  def _time_out(self, run: OpRun) -> None:
    self.end(run, 'timeout', _late(run))

  def _end(
    self,
    run: OpRun,
    status: Status,
    error: str,
    ready: list[OpRun],
    ended: list[TransferWork],
  ) -> None:
    if not run.is_live:
      return
    run.error, run.status = error, status
    for place in run.places:
      self._writers[place].remove(run)
      if not self._writers[place]:
        del self._writers[place]
    for dependent, reads in run.dependents:
      dependent.num_waits -= 1
      if reads and status != 'completed':
        why = f'its source was not written ({error})'
        self._end(dependent, 'failed', why, ready, ended)
      elif not dependent.num_waits:
        ready.append(dependent)
    run.work.num_live -= 1
    if not run.work.num_live:
      del self._works[run.work.work_id]
      ended.append(run.work)


def _places(side: DevicePages | Replica) -> tuple[object, ...]:
  """What another op may write or read; nobody reads scratch page 0."""
  if isinstance(side, Replica):
    return (side,)
  return tuple([(side.instance, page) for page in set(side.pages) if page])


def _late(run: OpRun) -> str:
  return f'deadline_s={run.work.deadline_s:.6f} passed'


def _same_layers(a: TransferOp, b: TransferOp) -> bool:
  return a.start_layer < b.stop_layer and b.start_layer < a.stop_layer
