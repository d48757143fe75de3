# SPDX-License-Identifier: Apache-2.0
"""Gets: leased lookups, of one block or of a chain's longest prefix.

Leases are of blocks: while one runs, no replica of the block is evicted or
removed. Probing (`peek`, `exists`) grants none and counts as no use.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import math

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import Span


class Gets(Ledger):
  """The Master's reads."""

  def get_chain(
    self,
    keys: Sequence[BlockKey],
    now_s: float,
    segment: str | None = None,
    prefer: str | None = None,
    max_remote_blocks: int | None = None,
  ) -> tuple[Replica, ...]:
    """The longest prefix at hand, one replica a block, leased and used.

    Of a block's replicas it takes the fastest medium (device, host, SSD,
    remote); of these the nearest (the reader's own segment, its group's,
    `prefer`, others); of these the one in the least busy segment.

    Args:
      keys: of a chain, from its first block.
      segment: the reader's own.
      prefer: where to read from rather than elsewhere; the scheduler's plan.
      max_remote_blocks: how many may come from other groups' segments; the
        prefix ends at the first more. None: any number. A remote store is
        nobody's, so nobody is asked.
    """
    counts = self._counts
    counts.calls['get'] += 1
    own = self._segment(segment) if segment is not None else None
    group = own.group if own is not None else None
    left = math.inf if max_remote_blocks is None else max_remote_blocks
    keys = tuple(keys)
    top = self._stamp = self._stamp + len(keys)
    found: list[Replica] = []
    used: dict[Segment, int] = {}
    while len(found) < len(keys):
      span = self._at(keys, len(found), len(keys))
      if span is None:
        break
      copy = span.first
      if copy.next is not None or copy.state < COMPLETE:
        copy = self._pick(span, own, prefer, left > 0, now_s)
        if copy is None:
          break
      place = copy.segment
      if place.group != group and not place.is_belief:
        if not any(
          c.state >= COMPLETE and c.segment.group == group
          for c in span.copies()
        ):
          if left <= 0:
            break
          if len(span.keys) > left:
            self._split(span, int(left))
          left -= len(span.keys)
      self._hold(span, now_s)
      found += copy.replicas
      copy.uses += 1
      copy.stamp = top - len(found) + 1
      used[place] = used.get(place, 0) + len(span.keys)
    for place, num_blocks in used.items():
      place.hits += num_blocks
      counts.hits[place.medium] += num_blocks
      place.add_load(num_blocks, now_s)
    counts.misses += len(found) < len(keys)
    return tuple(found)

  def get_replicas(self, key: BlockKey, now_s: float) -> tuple[Replica, ...]:
    """Readable replicas, with a lease on the block if there is any.

    Counts as a get, but as a use of no replica: the reader takes which it
    likes.
    """
    self._counts.calls['get'] += 1
    found = self.peek(key)
    if not found:
      self._counts.misses += 1
      return ()
    span = self._alone(key)
    assert span is not None
    self._hold(span, now_s)
    return found

  def lease(self, keys: Iterable[BlockKey], now_s: float) -> int:
    """Leases a chain up to its first block that nobody can serve.

    As `get_replicas` of each, but that all are one call. Returns how many.
    """
    self._counts.calls['get'] += 1
    found = 0
    for _, behind, span in self._along(tuple(keys)):
      if span is None or not span.num_readable():
        self._counts.misses += 1
        break
      self._hold(span, now_s)
      found = behind
    return found

  def peek(self, key: BlockKey) -> tuple[Replica, ...]:
    """Readable replicas, without a lease and without touching any."""
    span = self._spans.get(key)
    if span is None:
      return ()
    i = span.keys.index(key)
    return tuple(
      Replica(copy.segment.name, copy.replica_id - i, key)
      for copy in span.copies()
      if copy.state >= COMPLETE
    )

  def num_at(self, group: str, keys: Iterable[BlockKey]) -> int:
    """Leading blocks of a chain that a group's own segments can serve."""
    found = 0
    for _, behind, span in self._along(tuple(keys)):
      copy = None if span is None else span.first
      while copy and (copy.segment.group != group or copy.state < COMPLETE):
        copy = copy.next
      if copy is None:
        break
      found = behind
    return found

  def exists(self, key: BlockKey) -> bool:
    span = self._spans.get(key)
    return span is not None and span.num_readable() > 0

  def is_valid(self, replica: Replica) -> bool:
    """Whether bytes read from `replica` up to now are the block's.

    A published copy is written once and no other gets its number, so it is
    enough that it is still there, be the reader's lease over or not.
    """
    return _is_published(self._find(replica))

  def num_valid(self, replicas: Sequence[Replica]) -> int:
    """Leading ones of which `is_valid` holds."""
    count, replicas = 0, tuple(replicas)
    while count < len(replicas):
      copy = self._find(replicas[count])
      if copy is None or not _is_published(copy):
        break
      behind = count + len(copy.keys)
      all_are = replicas[count:behind] == copy.replicas
      count = behind if all_are else count + 1
    return count

  def touch(self, keys: Iterable[BlockKey], segment: str) -> None:
    """Marks a chain as just used in `segment`: tails go before heads.

    Renews recency alone; uses are counted by gets and puts.
    """
    space, chain = self._segment(segment), tuple(keys)
    top = self._stamp = self._stamp + len(chain)
    for _, behind, span in self._along(chain):
      copy = None if span is None else span.copy_in(space)
      if copy is not None:
        copy.stamp = top - behind + 1

  def uses(self, replica: Replica) -> int:
    """Leased gets of a replica, and the put that made it if one did.

    A replica that was adopted or copied starts at 0, so the second hit on an
    offloaded block finds 2.
    """
    copy = self._find(replica)
    return copy.uses if copy is not None else 0

  def heat(self, key: BlockKey, now_s: float) -> int:
    """Leased gets of a block, halved every `heat_half_life_s`."""
    span = self._spans.get(key)
    return self._heat(span, now_s) if span is not None else 0

  def inventory(self, segment: str) -> tuple[BlockKey, ...]:
    """Keys that `segment` can serve, least recently used first."""
    copies = self._segment(segment).copies()
    readable = [copy for copy in copies if copy.state >= COMPLETE]
    readable.sort(key=lambda copy: copy.stamp)
    return tuple(key for copy in readable for key in reversed(copy.keys))

  def replicas(self, segment: str) -> tuple[Replica, ...]:
    """All that were published there, those that are leaving included."""
    copies = self._segment(segment).copies()
    return tuple(replica for copy in copies for replica in copy.replicas)

  def num_published(self, segment: str) -> int:
    """How many those are."""
    return sum(len(copy.keys) for copy in self._segment(segment).copies())

  def used_bytes(self, segment: str) -> int:
    return self._segment(segment).used_bytes

  def _hold(self, span: Span, now_s: float) -> None:
    """Leases a span's blocks to one more reader."""
    span.heat = self._heat(span, now_s) + 1
    span.lease_until_s = max(span.lease_until_s, now_s + self.lease_s)

  def _pick(
    self,
    span: Span,
    own: Segment | None,
    prefer: str | None,
    far: bool,
    now_s: float,
  ) -> Copy | None:
    """The best readable copy; of no other group's memory unless `far`."""

    def rank(copy: Copy) -> tuple[int, int, float, int]:
      place = copy.segment
      if place is own:
        distance = 0
      elif own is not None and place.group == own.group:
        distance = 1
      else:
        distance = 2 if place.name == prefer else 3
      load = place.load_at(now_s)
      return place.medium_rank, distance, load, copy.replica_id

    group = own.group if own is not None else None
    readable = [
      copy
      for copy in span.copies()
      if copy.state >= COMPLETE
      and (far or copy.segment.group == group or copy.segment.is_belief)
    ]
    return min(readable, key=rank) if readable else None


def _is_published(copy: Copy | None) -> bool:
  """Whether a copy has its bytes, to be read by those who began to."""
  return copy is not None and copy.state != OPEN
