# SPDX-License-Identifier: Apache-2.0
"""The Master's books and the few ways to write in them.

Every copy is made by `_allocate`, shown by `_publish` and ended by `_forget`;
the Master's other parts only decide when. What holds for some blocks of a span
alone is written after `_at` or `_alone` has parted it.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.event_log import EventLog
from mooncake_jax.store.eviction import lru
from mooncake_jax.store.eviction import Policy
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import Span
from mooncake_jax.store.objects import SPARE
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.outcomes import evicted_of
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
    self._spans: dict[BlockKey, Span] = {}
    self._open: dict[Copy, float] = {}  # since when
    self._tasks: dict[Copy, CopyTask] = {}  # by destination, of one block
    self._leaving: dict[Copy, float] = {}  # until when
    self._bereft: dict[BlockKey, int] = {}  # copies wanted again
    self._stamp = 0

  def _segment(self, name: str) -> Segment:
    segment = self._segments.get(name)
    if segment is None:
      raise ValueError(f'segment={name!r} is not mounted')
    return segment

  def _find(self, replica: Replica) -> Copy | None:
    """The copy that a replica is of, and maybe others beside it."""
    span = self._spans.get(replica.key)
    copy = span.first if span is not None else None
    while copy is not None:
      if 0 <= copy.replica_id - replica.replica_id < len(copy.keys):
        break
      copy = copy.next
    assert copy is None or copy.segment.name == replica.segment, replica
    return copy

  def _find_alone(self, replica: Replica) -> Copy | None:
    """The copy of this replica and of no other."""
    self._alone(replica.key)
    return self._find(replica)

  def _alone(self, key: BlockKey) -> Span | None:
    """A block's span, which is of this block alone from now on."""
    return self._at((key,), 0, 1)

  def _at(
    self, chain: tuple[BlockKey, ...], first: int, stop: int
  ) -> Span | None:
    """The span of a chain's block `first` and as many behind it as are alike.

    It begins with that block and goes no further than chain[:stop]: what else
    was of it is parted from it. None if nobody has the block.
    """
    span = self._spans.get(chain[first])
    if span is None:
      return None
    if span.keys[0] != chain[first]:
      span = self._split(span, span.keys.index(chain[first]))
    keys = span.keys
    behind = first + len(keys)
    if behind > stop or keys != chain[first:behind]:
      pairs = zip(keys, chain[first:stop])
      unlike = (i for i, (a, b) in enumerate(pairs) if a != b)
      self._split(span, next(unlike, stop - first))
    return span

  def _along(
    self, chain: tuple[BlockKey, ...], first: int = 0, stop: int | None = None
  ) -> Iterator[tuple[int, int, Span | None]]:
    """Parts of a chain: blocks [i, j) and their span; None: nobody has them."""
    stop = len(chain) if stop is None else stop
    while first < stop:
      span = self._at(chain, first, stop)
      if span is None:
        behind = self._gap(chain, first, stop)
      else:
        behind = first + len(span.keys)
      yield first, behind, span
      first = behind

  def _gap(self, chain: tuple[BlockKey, ...], first: int, stop: int) -> int:
    """The first block of chain[first:stop] that anybody has, or `stop`."""
    spans = self._spans
    if not spans.keys().isdisjoint(chain[first:stop]):
      while chain[first] not in spans:
        first += 1
      return first
    return stop

  def _split(self, span: Span, count: int) -> Span:
    """Parts a span behind its first `count` blocks; returns the others'."""
    rest = span.part(count)
    self._spans.update(dict.fromkeys(rest.keys, rest))
    copy: Copy | None = span.first
    part: Copy | None = rest.first
    while copy is not None and part is not None:
      if copy.state == OPEN:
        self._open[part] = self._open[copy]
      elif copy in copy.segment.queue:
        copy.segment.queue.add(part)
      elif copy in copy.segment.unsaved:
        copy.segment.unsaved.add(part)
      if copy.state == LEAVING:
        self._leaving[part] = self._leaving[copy]
      copy, part = copy.next, part.next
    return rest

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

    Block i of the chain stands at `position` + i; what lies between indices
    is in the segment already. The caller has seen to the room.
    """
    made: list[Copy] = []
    top = self._stamp + len(chain)
    self._stamp = top
    count, chain = 0, tuple(chain)
    while count < len(indices):
      first, stop = indices[count], indices[-1] + 1
      span = self._at(chain, first, stop)
      is_new = span is None
      if span is None:
        span = Span(chain[first : self._gap(chain, first, stop)])
        self._spans.update(dict.fromkeys(span.keys, span))
      count += len(span.keys)
      last = first + len(span.keys) - 1
      copy = Copy(
        span,
        segment,
        size_bytes,
        top - first,
        top - last,
        position + last,
        tenant,
      )
      if is_new:
        span.first = copy
      else:
        span.link(copy)
      self._open[copy] = now_s
      made.append(copy)
    segment.used_bytes += count * size_bytes
    segment.num_copies += count
    if tenant is not None and count:
      self._quotas.charge(tenant, count * size_bytes)
    return made

  def _publish(self, copy: Copy) -> None:
    """Shows an open copy to readers and to eviction."""
    del self._open[copy]
    segment = copy.segment
    copy.state = COMPLETE
    (segment.queue if segment.lower is None else segment.unsaved).add(copy)
    segment.stuck_until_s = -1.0

  def _forget(self, copies: Iterable[Copy]) -> tuple[Evicted, ...]:
    """Ends copies, whatever their state, and what hung on them.

    Those that are not forgotten yet; of each the last block first.
    """
    gone: list[Evicted] = []
    for copy in copies:
      segment, state = copy.segment, copy.state
      if not copy.keys:
        continue
      gone += evicted_of(copy.replicas[::-1], state != OPEN)
      num_bytes = copy.num_bytes
      if state == OPEN:
        del self._open[copy]
        self._settle(copy, saved=False)
      elif state == LEAVING:
        del self._leaving[copy]
      elif state >= SPARE:
        segment.spare_bytes -= num_bytes
      segment.used_bytes -= num_bytes
      segment.num_copies -= len(copy.keys)
      if copy.tenant is not None:
        self._quotas.refund(copy.tenant, num_bytes)
      if not copy.span.unlink(copy):
        for key in copy.keys:
          del self._spans[key]
          self._bereft.pop(key, None)
      copy.let_go()
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
    copy.segment.spare_bytes += change * copy.num_bytes
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

  def _heat(self, span: Span, now_s: float) -> int:
    epoch = int(now_s / self.heat_half_life_s)
    return span.heat >> max(0, epoch - self._epoch_of(span.lease_until_s))
