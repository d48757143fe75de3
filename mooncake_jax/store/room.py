# SPDX-License-Identifier: Apache-2.0
"""Room: which copies go when a put needs their place, and which never."""

from collections.abc import Set

from mooncake_jax.request import BlockKey
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import Span
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.pins import Pins
from mooncake_jax.store.queue import EvictionQueue

_FOREVER = float('inf')
# Blocks beyond what is needed that one put evicts: some milliseconds' work.
_MAX_BATCH = 1000
# Blocks that may not go now, behind which nobody looks further: as much.
MAX_HELD = 1000


def held_until_s(span: Span) -> float:
  """When the blocks' last lease ends; inf while they are hard pinned."""
  pinned = span.pinned_until_s == _FOREVER
  return _FOREVER if pinned else span.lease_until_s


class Room(Pins):
  """The Master's evictions."""

  def _make_room(
    self,
    segment: Segment,
    num_bytes: int,
    size_bytes: int,
    now_s: float,
    keep: Set[BlockKey],
  ) -> tuple[Evicted, ...]:
    """Evicts so that `num_bytes` more stay below the high watermark.

    If not even one block of `size_bytes` found a place then, nothing goes.
    """
    capacity = segment.capacity_bytes
    limit = int(capacity * self.high_watermark)
    need = segment.used_bytes + num_bytes - limit
    if not num_bytes or need <= 0 or segment.stuck_until_s >= now_s:
      return ()
    batch = min(int(capacity * self.eviction_ratio), _MAX_BATCH * size_bytes)
    goal = max(need, batch)
    least = size_bytes - segment.free_bytes
    return self._evict(segment, goal, least, now_s, keep)

  def _make_quota(
    self,
    segment: Segment,
    num_bytes: int,
    now_s: float,
    keep: Set[BlockKey],
    tenant: str,
  ) -> tuple[Evicted, ...]:
    """Evicts the tenant's own here, as far as its quota asks for.

    Takes time in the number of the segment's copies, so it is batched too.
    """
    over = self._quotas.over(tenant, num_bytes)
    if not over:
      return ()
    limit = self._quotas.limits[tenant]
    goal = max(over, int(limit * self.eviction_ratio))
    return self._evict(segment, goal, 0, now_s, keep, tenant)

  def _evict(
    self,
    segment: Segment,
    goal_bytes: int,
    least_bytes: int,
    now_s: float,
    keep: Set[BlockKey],
    tenant: str | None = None,
  ) -> tuple[Evicted, ...]:
    """Frees `goal_bytes` or what can be, but nothing below `least_bytes`.

    Soft-pinned blocks go in a second pass, where the first was not enough,
    nor what others hold too and no offload has come to.
    """
    aside: list[Copy] = []
    soft: list[Copy] = []
    going: list[Copy] = []
    freed, free_at_s, queue = 0, _FOREVER, segment.queue
    while freed < goal_bytes and (copy := self._next(queue, keep)) is not None:
      span = copy.span
      if span.keys[-1] in keep or tenant not in (None, copy.tenant):
        aside.append(copy)
        free_at_s = -_FOREVER
      elif copy.state == LEAVING or span.is_open():
        aside.append(copy)
        free_at_s = -_FOREVER
      elif (until_s := held_until_s(span)) >= now_s:
        aside.append(copy)
        free_at_s = min(free_at_s, until_s)
      elif self._is_unsaved(copy, span):
        self._mark(copy, COMPLETE)
        segment.unsaved.add(copy)
      elif span.pinned_until_s >= now_s:
        soft.append(copy)
      else:
        copy = self._enough(copy, goal_bytes - freed, queue)
        freed += copy.num_bytes
        going.append(copy)
    if soft and freed < goal_bytes:
      saved = self._saved_elsewhere(
        segment, goal_bytes - freed, now_s, keep, tenant
      )
      freed += sum(copy.num_bytes for copy in saved)
      going += saved
    for copy in soft:
      if freed < goal_bytes:
        copy = self._enough(copy, goal_bytes - freed, queue)
        freed += copy.num_bytes
        going.append(copy)
      else:
        aside.append(copy)
    if aside and freed < goal_bytes:
      segment.stuck_until_s = free_at_s
    if freed < least_bytes:
      aside += going
      going, freed = [], 0
    for copy in aside:
      queue.add(copy)
    self._counts.evicted_blocks += sum(len(copy.keys) for copy in going)
    self._counts.evicted_bytes += freed
    return self._forget(going)

  def _saved_elsewhere(
    self,
    segment: Segment,
    num_bytes: int,
    now_s: float,
    keep: Set[BlockKey],
    tenant: str | None,
  ) -> list[Copy]:
    """Takes out of `unsaved` what may go since other segments have it.

    Unpinned ones, of `num_bytes` if so many are found in time.
    """
    found: list[Copy] = []
    aside: list[Copy] = []
    queue, num_aside = segment.unsaved, 0
    while num_bytes > 0 and num_aside < MAX_HELD:
      copy = self._next(queue, keep)
      if copy is None:
        break
      span = copy.span
      if (
        span.keys[-1] in keep
        or tenant not in (None, copy.tenant)
        or copy.state == LEAVING
        or span.is_open()
        or max(span.lease_until_s, span.pinned_until_s) >= now_s
        or self._is_unsaved(copy, span)
      ):
        aside.append(copy)
        num_aside += len(copy.keys)
      else:
        copy = self._enough(copy, num_bytes, queue)
        self._mark(copy, SPARE)
        num_bytes -= copy.num_bytes
        found.append(copy)
    for copy in aside:
      queue.add(copy)
    return found

  def _next(
    self, queue: EvictionQueue[Copy], keep: Set[BlockKey] = frozenset()
  ) -> Copy | None:
    """Takes out of a queue what goes next: blocks that may go together.

    None of another span goes between them, and some of them are in `keep`
    only if all are.
    """
    found = queue.pop()
    if found is None:
      return None
    copy, count = found
    if keep and not keep.isdisjoint(copy.keys):
      count = 1
    return copy if count == len(copy.keys) else self._last(copy, count, queue)

  def _enough(
    self, copy: Copy, num_bytes: int, queue: EvictionQueue[Copy]
  ) -> Copy:
    """Of a copy that was taken out of a queue what makes up `num_bytes`."""
    return self._last(copy, -(-num_bytes // copy.size_bytes), queue)

  def _last(
    self, copy: Copy, count: int, queue: EvictionQueue[Copy] | None = None
  ) -> Copy:
    """Of a copy in no queue the last blocks; `queue` gets the others."""
    span = copy.span
    if count >= len(span.keys):
      return copy
    rest = self._split(span, len(span.keys) - count)
    if queue is not None:
      queue.add(copy)
    part = rest.copy_in(copy.segment)
    assert part is not None
    return part

  def _is_unsaved(self, copy: Copy, span: Span) -> bool:
    """Whether the copy must be offloaded before it may go."""
    return (
      copy.segment.lower is not None
      and copy.state != CONDEMNED
      and span.num_kept() == 1
    )
