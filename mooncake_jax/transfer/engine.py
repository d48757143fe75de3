# SPDX-License-Identifier: Apache-2.0
"""The Transfer Engine: batches of ops between registered memories.

The paper's calls (FAST'25 section 3.1; Mooncake's transfer engine). A batch
has room for n ops and is submitted in one piece or several; each op has its
own status. COMPLETED means the bytes are readable at the destination and what
computed them had ended; a source that a later work overwrites was copied
before. Which ops wait for which says `book.py`.

Threads: any may call. `submit` moves nothing itself: owner and link threads
do. A status is a snapshot.
"""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import itertools
import math
import threading

from mooncake_jax.backend import Completion
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.op_run import OpStatus
from mooncake_jax.transfer.op_run import TransferWork
from mooncake_jax.transfer.regions import Region
from mooncake_jax.transfer.regions import Regions
from mooncake_jax.transfer.worker import LinkCount

BatchId = int


@dataclass(eq=False)
class _Batch:
  """Room for `num_ops` ops; `works` are its submissions still under way."""

  num_ops: int
  ended: Callable[['BatchId'], None]
  runs: list[OpRun] = field(default_factory=list)
  works: set[int] = field(default_factory=set)


class TransferEngine:
  """Batches over one book. `start` sends an op on its way."""

  def __init__(
    self,
    now_s: Callable[[], float],
    start: Callable[[Sequence[OpRun]], None],
    counts: Callable[[], dict[str, LinkCount]] = dict,
  ):
    """Makes an engine with no region.

    Args:
      now_s: the clock that deadlines are on.
      start: carries ops; returns at once and tells `book` the rest.
      counts: what each link has moved so far.
    """
    self.book = TransferBook(now_s, self._start, self._work_ended)
    self._now_s = now_s
    self._carry = start
    self._counts = counts
    self._regions = Regions()
    self._changed = threading.Condition()
    self._ids = itertools.count()
    self._batches: dict[BatchId, _Batch] = {}
    self._of_work: dict[int, BatchId] = {}

  def register(self, region: Region) -> None:
    """Lets ops use a region; ValueError if some of it is registered."""
    self._regions.add(region)

  def unregister(self, region: Region) -> None:
    """Ends that.

    Raises:
      ValueError: it is not registered, or an op under way uses it.
    """
    with self._changed:
      for batch in self._batches.values():
        for run in batch.runs:
          op = run.op
          if run.is_live and (region.holds(op.src) or region.holds(op.dst)):
            raise ValueError(f'{region} is in use by {op}')
      self._regions.remove(region)

  def allocate_batch(
    self,
    num_ops: int,
    ended: Callable[[BatchId], None] = lambda batch: None,
  ) -> BatchId:
    """Makes a batch with room for ops.

    Args:
      ended: called whenever all that was submitted has ended, from the
        thread that ended it.
    """
    if num_ops < 0:
      raise ValueError(f'{num_ops=} must be >= 0')
    with self._changed:
      batch = next(self._ids)
      self._batches[batch] = _Batch(num_ops, ended)
      return batch

  def submit(
    self,
    batch: BatchId,
    ops: Sequence[TransferOp],
    priority: int = 0,
    deadline_s: float = math.inf,
    after: tuple[WorkId, ...] = (),
    ops_completed: Callable[[Sequence[TransferOp]], None] | None = None,
  ) -> None:
    """Starts ops, lower `priority` first; past the deadline: TIMEOUT.

    Args:
      after, ops_completed: see `TransferWork`.

    Raises:
      ValueError: the batch has no room for them.
    """
    with self._changed:
      entry = self._at(batch)
      if len(entry.runs) + len(ops) > entry.num_ops:
        raise ValueError(
          f'{batch=} has room for {entry.num_ops} ops: {len(ops)} more than '
          f'its {len(entry.runs)} do not fit'
        )
      work = TransferWork(
        next(self._ids),
        priority,
        deadline_s,
        after=after,
        ops_completed=ops_completed,
      )
      work.runs = tuple(OpRun(op, work) for op in ops)
      entry.runs += work.runs
      entry.works.add(work.work_id)
      self._of_work[work.work_id] = batch
    self.book.add(work)

  def status(self, batch: BatchId, index: int) -> OpStatus:
    """How the batch's op stands; WAITING if it was not yet submitted."""
    entry = self._at(batch)
    if not 0 <= index < entry.num_ops:
      raise ValueError(f'{index=} is none of the {entry.num_ops} of {batch=}')
    if index >= len(entry.runs):
      return OpStatus('WAITING')
    return entry.runs[index].snapshot()

  def statuses(self, batch: BatchId) -> tuple[OpStatus, ...]:
    """The statuses of all ops submitted, in order."""
    return tuple(
      self.status(batch, i) for i in range(len(self._at(batch).runs))
    )

  def completion(self, work_id: WorkId, batch: BatchId) -> Completion:
    """What `Backend.wait` says of a batch that has ended."""
    runs, now_s = self._at(batch).runs, self._now_s()
    bad = next((run for run in runs if run.status != 'completed'), None)
    times_s = [run.work.started_s for run in runs]
    return Completion(
      work_id,
      'completed' if bad is None else bad.status or 'failed',
      min((t for t in times_s if t is not None), default=now_s),
      now_s,
      '' if bad is None else f'{bad.op}: {bad.error}',
      op_status=tuple(run.status or 'failed' for run in runs),
    )

  def wait(self, batch: BatchId, deadline_s: float) -> tuple[OpStatus, ...]:
    """Waits until all ops submitted have ended, at most to `deadline_s`."""
    while True:
      self.book.expire()
      with self._changed:
        now_s = self._now_s()
        if not self._at(batch).works or now_s >= deadline_s:
          break
        next_s = self.book.next_deadline_s()
        until_s = min(deadline_s, math.inf if next_s is None else next_s)
        self._changed.wait(min(max(until_s - now_s, 0.0), 1.0))
    return self.statuses(batch)

  def cancel(self, batch: BatchId) -> None:
    """Ends the ops whose bytes are not yet read; CANCELED."""
    with self._changed:
      entry = self._batches.get(batch)
      works = [*entry.works] if entry else []
    for work_id in works:
      self.book.cancel(work_id)

  def set_deadline(self, batch: BatchId, deadline_s: float) -> None:
    """Gives the ops that are under way a new deadline."""
    with self._changed:
      entry = self._batches.get(batch)
      works = {run.work for run in entry.runs} if entry else set()
    for work in works:
      work.deadline_s = deadline_s
    self.book.expire()

  def free_batch(self, batch: BatchId) -> None:
    """Forgets a batch; ValueError while one of its ops is pending."""
    with self._changed:
      if self._at(batch).works:
        raise ValueError(f'{batch=} has ops under way')
      del self._batches[batch]

  def fail_writers(self, replicas: Sequence[Replica]) -> None:
    """Ends the ops that are writing these replicas: they were dropped."""
    self.book.fail_writers(replicas)

  def counts(self) -> dict[str, LinkCount]:
    """What each link has moved so far, by its name."""
    return self._counts()

  def _start(self, runs: Sequence[OpRun]) -> None:
    """Carries the ops all of whose memory is registered."""
    good = []
    for run in runs:
      try:
        self._regions.check(run.op.src)
        self._regions.check(run.op.dst)
      except LookupError as error:
        self.book.end(run, 'failed', str(error))
      else:
        good.append(run)
    self._carry(good)

  def _work_ended(self, work: TransferWork) -> None:
    with self._changed:
      batch = self._of_work.pop(work.work_id)
      entry = self._batches[batch]
      entry.works.remove(work.work_id)
      is_over = not entry.works
      self._changed.notify_all()
    if is_over:
      entry.ended(batch)

  def _at(self, batch: BatchId) -> _Batch:
    if batch not in self._batches:
      raise ValueError(f'there is no {batch=}')
    return self._batches[batch]
