# SPDX-License-Identifier: Apache-2.0
"""Gets: leased lookups, of one block or of a chain's longest prefix.

Leases are per block: while one runs, no replica of the block is evicted or
removed. Probing (`peek`, `exists`) grants none and counts as no use.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import math

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.objects import Block
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment


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
    until_s, stamp = now_s + self.lease_s, self._stamp + len(keys)
    self._stamp = stamp
    epoch = int(now_s / self.heat_half_life_s)
    last_s, shift = None, 0
    found: list[Replica] = []
    used: dict[Segment, int] = {}
    place, start = None, 0
    blocks = self._blocks
    for key in keys:
      block = blocks.get(key)
      if block is None:
        break
      copy = block.first
      if copy.next is not None or copy.state < COMPLETE:
        copy = self._pick(block, own, prefer, left > 0, now_s)
        if copy is None:
          break
      if copy.segment is not place:
        if place is not None:
          used[place] = used.get(place, 0) + len(found) - start
        place, start = copy.segment, len(found)
      assert place is not None
      if place.group != group and not place.is_belief:
        if not any(
          c.state >= COMPLETE and c.segment.group == group
          for c in block.copies()
        ):
          if left <= 0:
            break
          left -= 1
      was_s = block.lease_until_s
      if was_s != last_s:
        last_s = was_s
        shift = max(0, epoch - self._epoch_of(was_s))
      block.heat = (block.heat >> shift) + 1
      if was_s < until_s:
        block.lease_until_s = until_s
      copy.uses += 1
      copy.stamp = stamp
      stamp -= 1
      found.append(Replica(place.name, copy.replica_id, key))
    if place is not None:
      used[place] = used.get(place, 0) + len(found) - start
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
    block = self._blocks[key]
    block.heat = self._heat(block, now_s) + 1
    block.lease_until_s = max(block.lease_until_s, now_s + self.lease_s)
    return found

  def lease(self, keys: Iterable[BlockKey], now_s: float) -> int:
    """Leases a chain up to its first block that nobody can serve.

    As `get_replicas` of each, but that all are one call. Returns how many.
    """
    self._counts.calls['get'] += 1
    blocks, until_s, found = self._blocks, now_s + self.lease_s, 0
    epoch = int(now_s / self.heat_half_life_s)
    last_s, shift = None, 0
    for key in keys:
      block = blocks.get(key)
      copy = None if block is None else block.first
      while copy is not None and copy.state < COMPLETE:
        copy = copy.next
      if block is None or copy is None:
        self._counts.misses += 1
        break
      was_s = block.lease_until_s
      if was_s != last_s:
        last_s = was_s
        shift = max(0, epoch - self._epoch_of(was_s))
      block.heat = (block.heat >> shift) + 1
      if was_s < until_s:
        block.lease_until_s = until_s
      found += 1
    return found

  def peek(self, key: BlockKey) -> tuple[Replica, ...]:
    """Readable replicas, without a lease and without touching any."""
    block = self._blocks.get(key)
    if block is None:
      return ()
    return tuple(c.replica for c in block.copies() if c.state >= COMPLETE)

  def num_at(self, group: str, keys: Iterable[BlockKey]) -> int:
    """Leading blocks of a chain that a group's own segments can serve."""
    blocks, found = self._blocks, 0
    for key in keys:
      block = blocks.get(key)
      copy = None if block is None else block.first
      while copy and (copy.segment.group != group or copy.state < COMPLETE):
        copy = copy.next
      if copy is None:
        break
      found += 1
    return found

  def exists(self, key: BlockKey) -> bool:
    block = self._blocks.get(key)
    return block is not None and block.num_readable() > 0

  def lease_valid(self, key: BlockKey, replica: Replica, now_s: float) -> bool:
    """Whether bytes read from `replica` up to now are the block's."""
    assert replica.key == key, replica
    copy = self._find(replica)
    if copy is None or copy.state == OPEN:
      return False
    assert copy.block is not None
    return copy.block.lease_until_s >= now_s

  def num_valid(self, replicas: Iterable[Replica], now_s: float) -> int:
    """Leading ones of which `lease_valid` holds."""
    blocks, count = self._blocks, 0
    for replica in replicas:
      block = blocks.get(replica.key)
      if block is None or block.lease_until_s < now_s:
        break
      copy, replica_id = block.first, replica.replica_id
      while copy is not None and copy.replica_id != replica_id:
        copy = copy.next
      if copy is None or copy.state == OPEN:
        break
      count += 1
    return count

  def touch(self, keys: Iterable[BlockKey], segment: str) -> None:
    """Marks a chain as just used in `segment`: tails go before heads.

    Renews recency alone; uses are counted by gets and puts.
    """
    space, chain = self._segment(segment), tuple(keys)
    stamp = self._stamp = self._stamp + len(chain)
    for block in map(self._blocks.get, chain):
      if block is not None:
        copy = block.first
        while copy is not None and copy.segment is not space:
          copy = copy.next
        if copy is not None:
          copy.stamp = stamp
      stamp -= 1

  def uses(self, replica: Replica) -> int:
    """Leased gets of a replica, and the put that made it if one did.

    A replica that was adopted or copied starts at 0, so the second hit on an
    offloaded block finds 2.
    """
    copy = self._find(replica)
    return copy.uses if copy is not None else 0

  def heat(self, key: BlockKey, now_s: float) -> int:
    """Leased gets of a block, halved every `heat_half_life_s`."""
    block = self._blocks.get(key)
    return self._heat(block, now_s) if block is not None else 0

  def inventory(self, segment: str) -> tuple[BlockKey, ...]:
    """Keys that `segment` can serve, least recently used first."""
    copies = self._segment(segment).copies()
    readable = [copy for copy in copies if copy.state >= COMPLETE]
    readable.sort(key=lambda copy: copy.stamp)
    return tuple(copy.key for copy in readable)

  def replicas(self, segment: str) -> tuple[Replica, ...]:
    """All that were published there, those that are leaving included."""
    return tuple(copy.replica for copy in self._segment(segment).copies())

  def num_published(self, segment: str) -> int:
    """How many those are."""
    return sum(1 for _ in self._segment(segment).copies())

  def used_bytes(self, segment: str) -> int:
    return self._segment(segment).used_bytes

  def _pick(
    self,
    block: Block,
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
      for copy in block.copies()
      if copy.state >= COMPLETE
      and (far or copy.segment.group == group or copy.segment.is_belief)
    ]
    return min(readable, key=rank) if readable else None
