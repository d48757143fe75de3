# SPDX-License-Identifier: Apache-2.0
"""A far segment: blocks outside this process's arrays, and its two links.

Bytes on an SSD or in another store are copied out of arrays and into new
ones, which takes a thread: one writes and deletes, one reads, so that a fetch
never waits for write-back. What was read and has not yet moved on is bounded.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from typing import runtime_checkable

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.worker import LinkCount
from mooncake_jax.transfer.worker import Worker

Layers = tuple[int, int]
Item = tuple[Replica, Part]
StoreAll = Callable[[Sequence[Item]], list[Exception | None]]
URGENT = -(1 << 30)  # deletions, which make room
BATCH_ITEMS = 32  # that are stored together


class FarSegment(Protocol):
  """Where the bytes are. A replica's key names them."""

  name: str
  capacity_bytes: int

  @property
  def used_bytes(self) -> int: ...

  def store(self, replica: Replica, part: Part) -> None:
    """Write link: writes a part that nobody can read before `keep`.

    Raises:
      ValueError: there is no room, it is there already, or is no such part.
      OSError: the medium failed.
    """
    ...

  def keep(self, replica: Replica, layers: Layers) -> None:
    """Makes a stored part readable. Any thread, at once."""
    ...

  def forget(self, replica: Replica, layers: Layers) -> None:
    """Gives up a stored part. Any thread, at once."""
    ...

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    """Layer ranges of the parts that hold the layers. Any thread, at once.

    Raises:
      LookupError: some of these layers are not here.
    """
    ...

  def read(self, replica: Replica, layers: Layers) -> Part:
    """Read link: a part, in memory that is nobody else's.

    Raises:
      LookupError: it is not here any more.
      ChecksumError: it is not what was written; it is removed.
    """
    ...

  def drop(self, replicas: Iterable[Replica]) -> None:
    """Forgets replicas, ignoring unknown ones. Any thread, at once."""
    ...

  def sweep(self) -> None:
    """Write link: deletes the bytes of what was forgotten."""
    ...

  def close(self) -> None: ...


@runtime_checkable
class Batches(Protocol):
  """Of a far segment that stores several parts quicker together."""

  @property
  def batch_bytes(self) -> int:
    """How many go together now, if that is more than one part. Any thread."""
    ...

  def store_all(self, items: Sequence[Item]) -> list[Exception | None]:
    """Write link: `store` of each; why it failed, or None."""
    ...


class SharedSegment(FarSegment, Protocol):
  """A far segment that other processes write too, and that evicts itself."""

  def exists(
    self, keys: Sequence[BlockKey], timeout_s: float | None = None
  ) -> list[bool]:
    """Which blocks are there now, whoever put them. Waits for the answer.

    Raises:
      TimeoutError: none came within `timeout_s`.
    """
    ...

  def reset(self) -> None:
    """Forgets all replicas, whose numbers others may get; blocks stay there.

    Only while no op reads or writes here.
    """
    ...


@dataclass(frozen=True, eq=False)
class Job:
  """One part to be written or read.

  Attributes:
    begin: called first; False drops the job.
    run: moves the bytes; of a job with an `item`, called once that is stored.
    failed: called with what `run` raised, or why the item is not stored.
    left: called when the source is no longer needed, whatever came.
    item: what to store first, together with other jobs' items.
    verify: called before that; raises where the item's bytes are not right.
  """

  num_bytes: int
  begin: Callable[[], bool]
  run: Callable[[], None]
  failed: Callable[[Exception], None]
  left: Callable[[], None] = lambda: None
  item: Item | None = None
  verify: Callable[[], None] = lambda: None


Joins = Callable[[list[Job], Job], bool]


def _never(jobs: list[Job], job: Job) -> bool:
  return False


class JobLink:
  """Runs jobs on its threads, lower priority first."""

  def __init__(
    self,
    name: str,
    on_crash: Callable[[str, BaseException], None],
    num_threads: int = 1,
    store_all: StoreAll | None = None,
    joins: Joins = _never,
  ):
    """Starts the threads.

    Args:
      store_all: stores items; says of each why not, or None.
      joins: see `Worker`.
    """
    self.name = name
    self._store_all = store_all
    self._worker: Worker[Job] = Worker(
      name, self._serve, on_crash, joins, num_threads
    )

  @property
  def count(self) -> LinkCount:
    return self._worker.count

  def submit(self, job: Job, priority: int) -> None:
    """Queues a job. Any thread may call."""
    self._worker.submit(job, priority)

  def take(self, budget: ByteBudget, num_bytes: int) -> bool:
    """See `Worker.take`."""
    return self._worker.take(budget, num_bytes)

  def close(self) -> None:
    """Ends the thread after the job under way; drops the others."""
    self._worker.close()

  def _serve(self, jobs: list[Job]) -> None:
    live = [job for job in jobs if _may_go(job)]
    items = [job.item for job in live if job.item is not None]
    # Either all have one, or there is but one job.
    errors = self._stored(items) if items else [None] * len(live)
    for job, error in zip(live, errors):
      try:
        if error is not None:
          raise error
        job.run()
        self._worker.moved(job.num_bytes)
      except Exception as why:
        job.failed(why)
    for job in jobs:
      job.left()

  def _stored(self, items: list[Item]) -> list[Exception | None]:
    assert self._store_all is not None, self.name
    try:
      return self._store_all(items)
    except Exception as error:
      return [error] * len(items)


def _joins(segment: Batches, jobs: list[Job], job: Job) -> bool:
  """Small items go in one message."""
  if job.item is None or jobs[0].item is None or len(jobs) == BATCH_ITEMS:
    return False
  return sum(j.num_bytes for j in jobs) + job.num_bytes <= segment.batch_bytes


def _may_go(job: Job) -> bool:
  try:
    if not job.begin():
      return False
    job.verify()
  except Exception as error:
    job.failed(error)
    return False
  return True


def _ways_to_store(segment: FarSegment) -> tuple[StoreAll, Joins]:
  if isinstance(segment, Batches):
    return segment.store_all, partial(_joins, segment)
  return partial(_store_one, segment), _never


def _store_one(
  segment: FarSegment, items: Sequence[Item]
) -> list[Exception | None]:
  (item,) = items
  segment.store(*item)
  return [None]


class FarTier:
  """A far segment, its links, and the bytes read but not yet moved on."""

  def __init__(
    self,
    segment: FarSegment,
    on_crash: Callable[[str, BaseException], None],
    in_flight_bytes: int,
    num_writers: int = 1,
  ):
    """Starts the threads; of a segment that allows it, several write."""
    self.segment = segment
    self.read_bytes = ByteBudget(in_flight_bytes)
    self.write_link = JobLink(
      f'{segment.name}-write',
      on_crash,
      num_writers,
      *_ways_to_store(segment),
    )
    self.read_link = JobLink(f'{segment.name}-read', on_crash)

  def drop(self, replicas: Iterable[Replica]) -> None:
    """Forgets replicas now and deletes their bytes ahead of later writes."""
    self.segment.drop(replicas)
    self.clean()

  def clean(self) -> None:
    """Has what was forgotten deleted soon."""
    sweep, segment = self.segment.sweep, self.segment
    job = Job(0, lambda: True, sweep, lambda error: _ignore(segment, error))
    self.write_link.submit(job, URGENT)

  def close(self) -> None:
    """Ends the threads and lets go of the medium."""
    self.read_bytes.close()
    self.write_link.close()
    self.read_link.close()
    self.segment.close()


def _ignore(segment: FarSegment, error: Exception) -> None:
  """What can't be deleted now is tried again at the next write."""
