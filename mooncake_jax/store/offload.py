# SPDX-License-Identifier: Apache-2.0
"""Offload: what goes from a segment to its lower tier, ahead of eviction.

In a segment with no lower tier a put evicts what it needs, at once. In one
that has a lower tier, nothing that only this segment has is ever evicted by a
put: `victims` names what would go next, the client copies it down and says so
by copy_end, and from then on the copy is spare: still there and read, but a
put may evict it at once. Since the block stays readable here until its copy
below is, there is no moment in which it is nowhere. The client calls `victims`
after every put, so that spare and free bytes stay above what lies beyond the
high watermark plus one batch; a put that comes too fast for that gets no
replica (refusal 'offload') and is simply not stored.

An offload that failed, or that finds no room below, condemns the copy: it may
go without, so a broken disk costs hits and stops nothing.
"""

from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.outcomes import Victims
from mooncake_jax.store.room import held_until_s
from mooncake_jax.store.room import MAX_HELD
from mooncake_jax.store.room import Room


class Offload(Room):
  """The Master's offloads."""

  def victims(self, segment: str, now_s: float) -> Victims:
    """Starts offloads of what goes next, as many as are due.

    Nothing for a segment without a lower tier. Leased blocks are left for
    later, soft-pinned ones go last; it looks at 1000 of both at most.
    """
    self._counts.calls['victims'] += 1
    space = self._segment(segment)
    going: list[Copy] = []
    soft: list[Copy] = []
    aside: list[Copy] = []
    queue, due_bytes, num_held = space.unsaved, self._due_bytes(space), 0
    while due_bytes > 0 and num_held < MAX_HELD:
      copy = self._next(queue)
      if copy is None:
        break
      span = copy.span
      busy = copy.state == LEAVING or span.is_open()
      if busy or held_until_s(span) >= now_s:
        aside.append(copy)
        num_held += len(copy.keys)
        continue
      copy = self._enough(copy, due_bytes, queue)
      if span.pinned_until_s >= now_s:
        soft.append(copy)
        num_held += len(copy.keys)
      else:
        going.append(copy)
        due_bytes -= copy.num_bytes
    for copy in soft:
      if due_bytes > 0:
        copy = self._enough(copy, due_bytes, queue)
        going.append(copy)
        due_bytes -= copy.num_bytes
      else:
        aside.append(copy)
    for copy in aside:
      queue.add(copy)
    evicted: list[Evicted] = []
    blocks = [block for copy in going for block in self._blocks_of(copy)]
    tasks = [self._save(block, now_s, evicted) for block in blocks]
    return Victims(tuple(t for t in tasks if t is not None), tuple(evicted))

  def _blocks_of(self, copy: Copy) -> list[Copy]:
    """Parts a copy that is in no queue into blocks, the last one first."""
    blocks: list[Copy] = []
    while len(copy.keys) > 1:
      blocks.append(self._last(copy, 1))
    return [*blocks, copy]

  def _save(
    self, copy: Copy, now_s: float, evicted: list[Evicted]
  ) -> CopyTask | None:
    """A block is next: starts its offload, unless others hold it too."""
    span, space = copy.span, copy.segment
    assert space.lower is not None
    space.queue.add(copy)
    space.stuck_until_s = -1.0
    below = span.copy_in(space.lower)
    if below is not None and below.state == LEAVING:
      self._stay(below)  # dropped there, and not gone yet
    if span.num_kept() > 1:
      self._mark(copy, SPARE)
      return None
    return self._offload(copy, now_s, evicted)

  def _stay(self, copy: Copy) -> None:
    """A moved copy is wanted here again before it left."""
    del self._leaving[copy]
    self._mark(copy, COMPLETE)

  def _due_bytes(self, segment: Segment) -> int:
    """Bytes short of the reserve that puts can take at once."""
    if segment.lower is None:
      return 0
    share = 1 - self.high_watermark + self.eviction_ratio
    reserve = int(segment.capacity_bytes * share)
    ready = segment.capacity_bytes - segment.used_bytes
    return reserve - ready - segment.spare_bytes - segment.offloading_bytes

  def _offload(
    self, copy: Copy, now_s: float, evicted: list[Evicted]
  ) -> CopyTask | None:
    """Opens a copy below, or condemns this one if none can be had."""
    lower = copy.segment.lower
    assert lower is not None
    evicted += self._make_room(
      lower, copy.size_bytes, copy.size_bytes, now_s, frozenset()
    )
    if lower.used_bytes + copy.size_bytes > lower.capacity_bytes:
      self._mark(copy, CONDEMNED)
      self._counts.condemned += 1
      return None
    target = self._open_copy(copy, lower, now_s)
    task = CopyTask('offload', copy.replica, target.replica, copy.size_bytes)
    self._tasks[target] = task
    copy.segment.offloading_bytes += copy.size_bytes
    return task

  def _open_copy(self, source: Copy, there: Segment, now_s: float) -> Copy:
    """Opens a copy of one block as old as it, unused and charged to nobody."""
    (target,) = self._allocate(
      source.keys,
      (0,),
      source.size_bytes,
      there,
      source.position,
      None,
      now_s,
    )
    target.stamp = source.stamp
    target.uses = 0
    return target
