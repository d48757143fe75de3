# SPDX-License-Identifier: Apache-2.0
"""How far works are, and who waits for which of their layers.

What `Backend` promises of `after`: a work touches a layer once those it names
are done with it, fails if one of them does, and ends later than they.

A chunk is done with a layer, for who uses the same pool, once the program
that computes it was dispatched: devices run what they are given in order.
Everyone else waits for its end. Any thread may call; a callback runs on the
thread that brought the news.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import threading

from mooncake_jax.backend import WorkId

Layers = tuple[int, int]  # [start, stop)
MAX_FAILED = 1 << 14  # works whose failure is remembered


@dataclass(eq=False)
class _Wait:
  """Someone who waits for `num` works and is told once: '' or an error."""

  then: Callable[[str], None]
  num: int = 0
  is_told: bool = False


@dataclass(eq=False)
class _Work:
  """A work under way.

  Attributes:
    pool: the instance whose pool a chunk writes; None for a transfer.
    left: parts not done yet, by their layers.
    waits: those who wait, and for which layers; None is for its end.
  """

  pool: str | None
  left: Counter[Layers]
  waits: list[tuple[Layers | None, _Wait]] = field(default_factory=list)

  def is_done(self, layers: Layers | None) -> bool:
    if layers is None:
      return False
    start, stop = layers
    return not any(start < b and a < stop for a, b in self.left)


class Progress:
  """Works from their start to their end."""

  def __init__(self):
    self._lock = threading.Lock()
    self._works: dict[WorkId, _Work] = {}
    self._failed: dict[WorkId, str] = {}

  def open(
    self, work_id: WorkId, parts: Iterable[Layers], pool: str | None = None
  ) -> None:
    """Notes that a work is under way.

    Args:
      parts: layer ranges, each of which `parts_done` will be told.
      pool: the instance whose pool it writes, for a chunk.
    """
    work = _Work(pool, Counter(parts))
    with self._lock:
      self._works[work_id] = work

  def parts_done(self, work_id: WorkId, parts: Iterable[Layers]) -> None:
    """The work is done with some of its parts."""
    with self._lock:
      if (work := self._works.get(work_id)) is None:
        return
      left = work.left
      for part in parts:
        left[part] -= 1
        if not left[part]:
          del left[part]
      if not work.waits:
        return
      waits = work.waits
      work.waits = [w for w in waits if not work.is_done(w[0])]
      told = _count(wait for layers, wait in waits if work.is_done(layers))
    _tell(told, '')

  def end(self, work_id: WorkId, error: str) -> None:
    """The work has ended, by an error if one is given."""
    with self._lock:
      if (work := self._works.pop(work_id, None)) is None:
        return
      waits = [wait for _, wait in work.waits]
      if error:
        error = f'work {work_id}, which it waits for, {error}'
        self._failed[work_id] = error
        if len(self._failed) > MAX_FAILED:
          del self._failed[next(iter(self._failed))]
        told = [wait for wait in waits if not wait.is_told]
        for wait in told:
          wait.is_told = True
      else:
        told = _count(waits)
    _tell(told, error)

  def when(
    self,
    after: Sequence[WorkId],
    layers: Layers | None,
    then: Callable[[str], None],
    pool: str | None = None,
  ) -> None:
    """Calls `then` once: with '', or with what became of a failed work.

    Args:
      after: works; one that is unknown has completed.
      layers: when they are done with these; None is when they have ended.
      pool: the instance whose pool the caller uses.
    """
    wait = _Wait(then)
    with self._lock:
      error = next((self._failed[i] for i in after if i in self._failed), '')
      for work in () if error else filter(None, map(self._works.get, after)):
        needed = layers if work.pool in (None, pool) else None
        if not work.is_done(needed):
          work.waits.append((needed, wait))
          wait.num += 1
      wait.is_told = not wait.num
    if wait.is_told:
      then(error)


def _count(waits: Iterable[_Wait]) -> list[_Wait]:
  """Notes that each waits for one work less; returns those that are through."""
  told = []
  for wait in waits:
    wait.num -= 1
    if not wait.num and not wait.is_told:
      wait.is_told = True
      told.append(wait)
  return told


def _tell(waits: Iterable[_Wait], error: str) -> None:
  for wait in waits:
    wait.then(error)
