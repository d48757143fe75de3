# SPDX-License-Identifier: Apache-2.0
"""Segments come, go by plan, and get lost; what was lost is repaired."""

from collections.abc import Iterable
import math

from mooncake_jax.blocks.segments import MEDIA
from mooncake_jax.blocks.segments import Medium
from mooncake_jax.request import BlockKey
from mooncake_jax.store.eviction import Policy
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import Departed
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.outcomes import Wanting
from mooncake_jax.store.queue import EvictionQueue
from mooncake_jax.store.tasks import Tasks


class Mounts(Tasks):
  """The Master's segments."""

  def mount(
    self,
    segment: str,
    capacity_bytes: int,
    medium: Medium = 'host',
    group: str | None = None,
    lower: str | None = None,
    policy: Policy | None = None,
  ) -> None:
    """Adds an empty segment.

    Args:
      medium: readers prefer device to host to ssd to remote.
      group: whose memory it is; the name up to the first '/' if None, so
        that 'prefill0' and 'prefill0/ssd' are near each other.
      lower: the segment that its blocks go to before they are evicted; see
        `offload`. None: they just go.
      policy: which copy goes first; the Master's if None.

    Raises:
      ValueError: mounted already, a bad size or medium, an unknown `lower`.
    """
    self._counts.calls['mount'] += 1
    if segment in self._segments:
      raise ValueError(f'{segment=} is mounted already')
    if capacity_bytes < 0:
      raise ValueError(f'{segment=}: {capacity_bytes=} must be >= 0')
    if medium not in MEDIA:
      raise ValueError(f'{segment=}: {medium=} must be in {MEDIA}')
    below = self._segment(lower) if lower is not None else None
    if below is not None and below.draining:
      raise ValueError(f'{segment=}: {lower=} is leaving')
    policy = policy or self.policy
    self._segments[segment] = Segment(
      segment,
      medium,
      segment.split('/')[0] if group is None else group,
      capacity_bytes,
      EvictionQueue(policy),
      EvictionQueue(policy),
      below,
    )

  def set_lower(self, segment: str, lower: str) -> None:
    """What `segment` holds goes to `lower` first from now on."""
    space = self._segment(segment)
    space.lower = self._segment(lower)
    while (found := space.queue.pop()) is not None:
      copy, _ = found
      if copy.state >= SPARE:
        self._mark(copy, COMPLETE)
      space.unsaved.add(copy)

  def unmount(self, segment: str, now_s: float = math.inf) -> Departed:
    """Takes a segment out by plan; it is gone when nothing waits.

    From now on it takes no put and serves no new reader. What is leased now
    stays until that lease ends, what is being written or copied until that
    ends; `reap` tells of them. A second call says what still waits. Without
    `now_s` no lease counts.
    """
    self._counts.calls['unmount'] += 1
    space = self._segment(segment)
    first, space.draining = not space.draining, True
    copies = list(space.copies())
    evicted: list[Evicted] = []
    lost = kept = ()
    if first:
      self._cut_off(space)
      ours = [copy for copy in copies if copy.state >= COMPLETE]
      lost, kept = self._lost_and_kept(ours)
      for copy in ours:
        evicted += self._part(copy, now_s)
    else:
      for copy in copies:
        until_s = self._leaving.get(copy, math.inf)
        if until_s < now_s and not copy.span.is_open():
          evicted += self._forget((copy,))
    if not space.num_copies:
      del self._segments[segment]
    return Departed(lost, kept, tuple(evicted), space.num_copies)

  def lose(self, segment: str) -> Departed:
    """Forgets a segment that is gone with all in it, and tasks with it.

    `evicted` holds half-written copies elsewhere whose source it had.
    """
    self._counts.calls['lose'] += 1
    space = self._segment(segment)
    self._cut_off(space)
    copies = list(space.copies())
    lost, kept = self._lost_and_kept(c for c in copies if c.state >= COMPLETE)
    orphans = [
      target
      for target, task in self._tasks.items()
      if task.src.segment == segment and target.segment is not space
    ]
    evicted = self._forget(orphans)
    self._forget(copies)
    self._forget([c for c in self._open if c.segment is space])
    assert space.num_copies == 0 == space.used_bytes, space.name
    del self._segments[segment]
    return Departed(lost, kept, evicted)

  def under_replicated(
    self, now_s: float, min_heat: int = 1, max_blocks: int | None = None
  ) -> tuple[Wanting, ...]:
    """Blocks that lost a replica with a segment and are still hot.

    Hottest first; a block leaves the list when it has as many readable
    replicas as before, or none.
    """
    found = []
    for key, wanted in list(self._bereft.items()):
      span = self._spans[key]
      have = span.num_readable()
      if have >= wanted:
        del self._bereft[key]
        continue
      heat = self._heat(span, now_s)
      if have and heat >= min_heat:
        found.append(Wanting(key, heat, have, wanted))
    found.sort(key=lambda wanting: (-wanting.heat, wanting.key))
    return tuple(found[:max_blocks])

  def choose_segment(
    self,
    key: BlockKey,
    size_bytes: int,
    now_s: float,
    medium: Medium = 'host',
  ) -> str | None:
    """Where one more replica belongs; None if no segment can take it.

    A segment that has no copy, of a group that has none if there is one, the
    least busy. Puts and copies count as busy, so a new empty segment is not
    flooded.
    """
    span = self._spans.get(key)
    having = [c.segment for c in span.copies()] if span is not None else []
    groups = {segment.group for segment in having}
    fit = [
      (segment.group in groups, segment.load_at(now_s), segment.name)
      for segment in self._segments.values()
      if segment.medium == medium
      and segment not in having
      and not segment.draining
      and size_bytes <= segment.capacity_bytes
    ]
    return min(fit)[2] if fit else None

  def _cut_off(self, space: Segment) -> None:
    """Nothing is offloaded to it any more; who did evicts plainly."""
    for above in self._segments.values():
      if above.lower is space:
        above.lower = None
        above.stuck_until_s = -math.inf
        while (found := above.unsaved.pop()) is not None:
          above.queue.add(found[0])

  def _lost_and_kept(
    self, copies: Iterable[Copy]
  ) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
    """Sorts readable copies that go by whether others serve the block."""
    lost: list[BlockKey] = []
    kept: list[BlockKey] = []
    for copy in copies:
      keys, readable = copy.keys, copy.span.num_readable()
      if readable == 1:
        lost += keys
        continue
      kept += keys
      for key in keys:
        self._bereft[key] = max(readable, self._bereft.get(key, 0))
    self._counts.lost += len(lost)
    return tuple(lost), tuple(kept)
