# SPDX-License-Identifier: Apache-2.0
"""The Master's books and the few ways to write in them.

Every copy is made by `_allocate`, shown by `_publish` and ended by `_forget`;
the Master's other parts only decide when.
"""

from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.event_log import EventLog
from mooncake_jax.store.eviction import lru
from mooncake_jax.store.eviction import Policy
from mooncake_jax.store.objects import Block
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.quotas import Quotas
from mooncake_jax.store.statistics import Counts


class Ledger:
  """Blocks, segments, and what is under way."""

  def __init__(
    self,
    lease_s: float = 10.0,
    high_watermark: float = 0.95,
    eviction_ratio: float = 0.05,
    policy: Policy = lru,
    put_timeout_s: float = 30.0,
    heat_half_life_s: float = 60.0,
  ):
    """Makes a Master with no segment.

    Args:
      lease_s: how long a lease runs; each get renews it.
      high_watermark: share of a segment above which a put evicts first.
      eviction_ratio: share of a segment freed at once, at least what is
        needed (batched, as evicting is rarer then).
      policy: which copy goes first, where `mount` names no other.
      put_timeout_s: a put or copy older than this is taken for dead.
      heat_half_life_s: how fast a block's heat fades.

    Raises:
      ValueError: naming the setting that is out of range.
    """
    if not 0 < high_watermark <= 1:
      raise ValueError(f'{high_watermark=} must be in (0, 1]')
    if not 0 <= eviction_ratio <= 1:
      raise ValueError(f'{eviction_ratio=} must be in [0, 1]')
    if not lease_s > 0:
      raise ValueError(f'{lease_s=} must be > 0 seconds')
    if not put_timeout_s > 0:
      raise ValueError(f'{put_timeout_s=} must be > 0 seconds')
    if not heat_half_life_s > 0:
      raise ValueError(f'{heat_half_life_s=} must be > 0 seconds')
    self.lease_s = lease_s
    self.high_watermark = high_watermark
    self.eviction_ratio = eviction_ratio
    self.policy = policy
    self.put_timeout_s = put_timeout_s
    self.heat_half_life_s = heat_half_life_s
    self.events = EventLog()  # numbers what is told of the segments
    self._quotas = Quotas()
    self._counts = Counts()
    self._segments: dict[str, Segment] = {}
    self._blocks: dict[BlockKey, Block] = {}
    self._open: dict[Copy, float] = {}  # since when, oldest first
    self._tasks: dict[Copy, CopyTask] = {}  # by destination
    self._leaving: dict[Copy, float] = {}  # until when
    self._bereft: dict[BlockKey, int] = {}  # copies wanted again
    self._stamp = 0

  def _segment(self, name: str) -> Segment:
    segment = self._segments.get(name)
    if segment is None:
      raise ValueError(f'segment={name!r} is not mounted')
    return segment

  def _find(self, replica: Replica) -> Copy | None:
    block = self._blocks.get(replica.key)
    copy = block.first if block is not None else None
    replica_id = replica.replica_id
    while copy is not None and copy.replica_id != replica_id:
      copy = copy.next
    assert copy is None or copy.segment.name == replica.segment, replica
    return copy

  def _allocate(
    self,
    chain: Sequence[BlockKey],
    indices: Sequence[int],
    size_bytes: int,
    segment: Segment,
    position: int,
    tenant: str | None,
    now_s: float,
  ) -> list[Copy]:
    """Makes open copies of chain[i], i in indices, tails stamped first.

    Block i of the chain stands at `position` + i. The caller has seen to the
    room.
    """
    made, blocks, under_way = [], self._blocks, self._open
    top = self._stamp + len(chain)
    self._stamp = top
    for i in indices:
      key = chain[i]
      block = blocks.get(key)
      is_new = block is None
      if block is None:
        block = blocks[key] = Block(key)
      stamp = top - i
      copy = Copy(
        block, segment, size_bytes, stamp, stamp, position + i, tenant
      )
      if is_new:
        block.first = copy
      else:
        block.link(copy)
      under_way[copy] = now_s
      made.append(copy)
    segment.used_bytes += len(made) * size_bytes
    segment.num_copies += len(made)
    if tenant is not None and made:
      self._quotas.charge(tenant, len(made) * size_bytes)
    return made

  def _publish(self, copy: Copy) -> None:
    """Shows an open copy to readers and to eviction."""
    del self._open[copy]
    segment = copy.segment
    copy.state = COMPLETE
    (segment.queue if segment.lower is None else segment.unsaved).add(copy)
    segment.stuck_until_s = -1.0

  def _forget(self, copy: Copy) -> Evicted:
    """Ends a copy, whatever its state, and what hung on it."""
    assert copy.block is not None, copy.replica_id
    return self._forget_all((copy,))[0]

  def _forget_all(self, copies: Iterable[Copy]) -> tuple[Evicted, ...]:
    """Ends those that are not forgotten yet."""
    gone: list[Evicted] = []
    refunds: dict[str | None, int] = {}
    for copy in copies:
      block, segment, state = copy.block, copy.segment, copy.state
      if block is None:
        continue
      key, size_bytes, tenant = block.key, copy.size_bytes, copy.tenant
      replica = Replica(segment.name, copy.replica_id, key)
      gone.append(Evicted(key, replica, state != OPEN))
      if state == OPEN:
        del self._open[copy]
        self._settle(copy, saved=False)
      elif state == LEAVING:
        del self._leaving[copy]
      elif state >= SPARE:
        segment.spare_bytes -= size_bytes
      segment.used_bytes -= size_bytes
      segment.num_copies -= 1
      refunds[tenant] = refunds.get(tenant, 0) + size_bytes
      if not block.unlink(copy):
        del self._blocks[key]
        self._bereft.pop(key, None)
      copy.block = copy.next = None
    for tenant, num_bytes in refunds.items():
      if tenant is not None:
        self._quotas.refund(tenant, num_bytes)
    return tuple(gone)

  def _settle(self, target: Copy, saved: bool) -> CopyTask | None:
    """Closes the task that wrote `target`, if one did; frees its source."""
    task = self._tasks.pop(target, None)
    if task is None:
      return None
    src = self._find(task.src)
    if src is not None:
      src.segment.stuck_until_s = -1.0
      if task.kind == 'offload':
        src.segment.offloading_bytes -= src.size_bytes
        self._counts.condemned += not saved
        if src.state != LEAVING:
          self._mark(src, SPARE if saved else CONDEMNED)
    return task

  def _mark(self, copy: Copy, state: int) -> None:
    """Moves a published copy between its states."""
    change = (state >= SPARE) - (copy.state >= SPARE)
    copy.segment.spare_bytes += change * copy.size_bytes
    copy.state = state

  def _leave(self, copy: Copy, until_s: float) -> None:
    """No new reader from now on; `reap` ends it after `until_s`."""
    self._mark(copy, LEAVING)
    self._leaving[copy] = until_s

  def _tidy(self, segment: Segment) -> None:
    """Keeps the queues from filling with forgotten copies."""
    for queue in (segment.queue, segment.unsaved):
      if len(queue) > 2 * segment.num_copies + 64:
        queue.compact()

  def _epoch_of(self, lease_until_s: float) -> int:
    """Half-lives from the clock's start to the get that got this lease."""
    return int((lease_until_s - self.lease_s) / self.heat_half_life_s)

  def _heat(self, block: Block, now_s: float) -> int:
    epoch = int(now_s / self.heat_half_life_s)
    return block.heat >> max(0, epoch - self._epoch_of(block.lease_until_s))
