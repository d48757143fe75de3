# SPDX-License-Identifier: Apache-2.0
"""Room: which copies go when a put needs their place, and which never."""

from collections.abc import Collection

from mooncake_jax.request import BlockKey
from mooncake_jax.store.objects import Block
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.pins import Pins

_FOREVER = float('inf')
# Blocks beyond what is needed that one put evicts: some milliseconds' work.
_MAX_BATCH = 1000
# Blocks that may not go now, behind which nobody looks further: as much.
MAX_HELD = 1000


def held_until_s(block: Block) -> float:
  """When the block's last lease ends; inf while it is hard pinned."""
  pinned = block.pinned_until_s == _FOREVER
  return _FOREVER if pinned else block.lease_until_s


class Room(Pins):
  """The Master's evictions."""

  def _make_room(
    self,
    segment: Segment,
    num_bytes: int,
    size_bytes: int,
    now_s: float,
    keep: Collection[BlockKey],
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
    keep: Collection[BlockKey],
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
    keep: Collection[BlockKey],
    tenant: str | None = None,
  ) -> tuple[Evicted, ...]:
    """Frees `goal_bytes` or what can be, but nothing below `least_bytes`.

    Soft-pinned blocks go in a second pass, where the first was not enough,
    nor what others hold too and no offload has come to.
    """
    aside: list[Copy] = []
    soft: list[Copy] = []
    going: list[Copy] = []
    freed, free_at_s = 0, _FOREVER
    while freed < goal_bytes and (copy := segment.queue.pop()) is not None:
      block = copy.block
      assert block is not None
      if block.key in keep or tenant not in (None, copy.tenant):
        aside.append(copy)
        free_at_s = -_FOREVER
      elif copy.state == LEAVING or block.is_open():
        aside.append(copy)
        free_at_s = -_FOREVER
      elif (until_s := held_until_s(block)) >= now_s:
        aside.append(copy)
        free_at_s = min(free_at_s, until_s)
      elif self._is_unsaved(copy, block):
        self._mark(copy, COMPLETE)
        segment.unsaved.add(copy)
      elif block.pinned_until_s >= now_s:
        soft.append(copy)
      else:
        freed += copy.size_bytes
        going.append(copy)
    if soft and freed < goal_bytes:
      saved = self._saved_elsewhere(
        segment, goal_bytes - freed, now_s, keep, tenant
      )
      freed += sum(copy.size_bytes for copy in saved)
      going += saved
    for copy in soft:
      wanted = freed < goal_bytes
      freed += copy.size_bytes if wanted else 0
      (going if wanted else aside).append(copy)
    if aside and freed < goal_bytes:
      segment.stuck_until_s = free_at_s
    if freed < least_bytes:
      aside += going
      going, freed = [], 0
    for copy in aside:
      segment.queue.add(copy)
    self._counts.evicted_blocks += len(going)
    self._counts.evicted_bytes += freed
    return self._forget_all(going)

  def _saved_elsewhere(
    self,
    segment: Segment,
    num_bytes: int,
    now_s: float,
    keep: Collection[BlockKey],
    tenant: str | None,
  ) -> list[Copy]:
    """Takes out of `unsaved` what may go since other segments have it.

    Unpinned ones, of `num_bytes` if so many are found in time.
    """
    found: list[Copy] = []
    aside: list[Copy] = []
    while num_bytes > 0 and len(aside) < MAX_HELD:
      copy = segment.unsaved.pop()
      if copy is None:
        break
      block = copy.block
      assert block is not None
      if (
        block.key in keep
        or tenant not in (None, copy.tenant)
        or copy.state == LEAVING
        or block.is_open()
        or max(block.lease_until_s, block.pinned_until_s) >= now_s
        or self._is_unsaved(copy, block)
      ):
        aside.append(copy)
      else:
        self._mark(copy, SPARE)
        num_bytes -= copy.size_bytes
        found.append(copy)
    for copy in aside:
      segment.unsaved.add(copy)
    return found

  def _is_unsaved(self, copy: Copy, block: Block) -> bool:
    """Whether the copy must be offloaded before it may go."""
    return (
      copy.segment.lower is not None
      and copy.state != CONDEMNED
      and block.num_kept() == 1
    )
