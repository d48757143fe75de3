# SPDX-License-Identifier: Apache-2.0
"""The Master: which blocks exist, where, and which may go.

It allocates and publishes; it never touches bytes and never waits. A put is
two-phase: put_start allocates a replica nobody can read, put_end publishes
it, put_revoke gives it up. A replica's id is never used twice, so bytes of a
dropped one can't be taken for another's.

Leases are per block: while one runs, no replica of the block is evicted or
removed. `get_replicas` grants one; probing (`exists`) does not.

As in Mooncake Store (FAST'25 section 3.2; the store's design document).
Differs: one replica a segment and segments chosen by the caller; LRU order is
that of touches, not of lease ends.
"""

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
import itertools
import math

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey


@dataclass
class _Segment:
  """A segment's replicas by key, least recently touched first."""

  capacity_bytes: int
  used_bytes: int = 0
  replicas: OrderedDict[BlockKey, '_Copy'] = field(default_factory=OrderedDict)


@dataclass
class _Copy:
  replica: Replica
  size_bytes: int
  complete: bool = False


@dataclass
class _Object:
  """A block: its copies by segment and the end of its lease."""

  copies: dict[str, _Copy] = field(default_factory=dict)
  lease_until_s: float = -math.inf


@dataclass(frozen=True)
class Evicted:
  key: BlockKey
  replica: Replica


@dataclass(frozen=True)
class PutStart:
  """What put_start decided.

  Attributes:
    replica: where to write; None where nothing is to be written.
    stored: the segment holds the block already, or another put of it is
      under way (a duplicate put succeeds and keeps the old value). Neither:
      there was no room.
    evicted: replicas that went to make room; their bytes are to be dropped.
  """

  replica: Replica | None = None
  stored: bool = False
  evicted: tuple[Evicted, ...] = ()


class Master:
  """Metadata of all segments of one cluster."""

  def __init__(
    self,
    lease_s: float = 10.0,
    high_watermark: float = 0.95,
    eviction_ratio: float = 0.05,
  ):
    """Makes a Master with no segment.

    Args:
      lease_s: how long a lease runs; each get renews it.
      high_watermark: share of a segment above which a put evicts first.
      eviction_ratio: share of a segment freed at once, at least what is
        needed (batched, as evicting is rarer then).
    """
    if not 0 < high_watermark <= 1:
      raise ValueError(f'{high_watermark=} must be in (0, 1]')
    if not 0 <= eviction_ratio <= 1:
      raise ValueError(f'{eviction_ratio=} must be in [0, 1]')
    if not lease_s > 0:
      raise ValueError(f'{lease_s=} must be > 0 seconds')
    self.lease_s = lease_s
    self.high_watermark = high_watermark
    self.eviction_ratio = eviction_ratio
    self._segments: dict[str, _Segment] = {}
    self._objects: dict[BlockKey, _Object] = {}
    self._ids = itertools.count()

  def mount(self, segment: str, capacity_bytes: int) -> None:
    """Adds an empty segment."""
    if segment in self._segments:
      raise ValueError(f'{segment=} is mounted already')
    if capacity_bytes < 0:
      raise ValueError(f'{segment=}: {capacity_bytes=} must be >= 0')
    self._segments[segment] = _Segment(capacity_bytes)

  def unmount(self, segment: str) -> tuple[BlockKey, ...]:
    """Forgets a segment and all in it; returns the keys it could serve."""
    lost = self._segments[segment].replicas
    keys = tuple(key for key, copy in lost.items() if copy.complete)
    for key in list(lost):
      self._forget(key, segment)
    del self._segments[segment]
    return keys

  def put_start(
    self,
    key: BlockKey,
    size_bytes: int,
    segment: str,
    now_s: float,
    keep: Collection[BlockKey] = (),
  ) -> PutStart:
    """Allocates an unpublished replica in `segment`, evicting if need be.

    Blocks of `keep` are not evicted for it: its own chain, whose heads are
    worth more than this tail.
    """
    if size_bytes < 1:
      raise ValueError(f'{size_bytes=} must be >= 1')
    space = self._segments[segment]
    if key in space.replicas:
      return PutStart(stored=True)
    evicted = self._make_room(segment, size_bytes, now_s, keep)
    if space.used_bytes + size_bytes > space.capacity_bytes:
      return PutStart(evicted=evicted)
    copy = _Copy(Replica(segment, next(self._ids), key), size_bytes)
    space.replicas[key] = copy
    space.used_bytes += size_bytes
    self._objects.setdefault(key, _Object()).copies[segment] = copy
    return PutStart(copy.replica, evicted=evicted)

  def put_end(self, key: BlockKey, replica: Replica) -> bool:
    """Publishes a replica whose bytes are all there; False if it is gone."""
    copy = self._find(key, replica)
    if copy is None:
      return False
    copy.complete = True
    return True

  def put_revoke(self, key: BlockKey, replica: Replica) -> None:
    """Gives up a replica that was not published; ignores one that is gone."""
    copy = self._find(key, replica)
    if copy is None:
      return
    if copy.complete:
      raise ValueError(f'put_revoke of published {replica=}')
    self._forget(key, replica.segment)

  def get_replicas(self, key: BlockKey, now_s: float) -> tuple[Replica, ...]:
    """Readable replicas, with a lease on the block if there is any."""
    found = self.peek(key)
    if found:
      block = self._objects[key]
      block.lease_until_s = max(block.lease_until_s, now_s + self.lease_s)
    return found

  def peek(self, key: BlockKey) -> tuple[Replica, ...]:
    """Readable replicas, without a lease and without touching any."""
    block = self._objects.get(key)
    if block is None:
      return ()
    return tuple(c.replica for c in block.copies.values() if c.complete)

  def exists(self, key: BlockKey) -> bool:
    return bool(self.peek(key))

  def lease_valid(self, key: BlockKey, replica: Replica, now_s: float) -> bool:
    """Whether bytes read from `replica` up to now are the block's."""
    copy = self._find(key, replica)
    return (
      copy is not None
      and copy.complete
      and self._objects[key].lease_until_s >= now_s
    )

  def touch(self, keys: Iterable[BlockKey], segment: str) -> None:
    """Marks a chain as just used in `segment`: tails go before heads."""
    replicas = self._segments[segment].replicas
    for key in reversed(tuple(keys)):
      if key in replicas:
        replicas.move_to_end(key)

  def remove(self, key: BlockKey, now_s: float) -> tuple[Replica, ...] | None:
    """Removes a block; its replicas to drop, or None while it is leased."""
    block = self._objects.get(key)
    if block is None:
      return ()
    if self._in_use(key, now_s):
      return None
    gone = tuple(copy.replica for copy in block.copies.values())
    for replica in gone:
      self._forget(key, replica.segment)
    return gone

  def inventory(self, segment: str) -> tuple[BlockKey, ...]:
    """Keys that `segment` can serve, least recently touched first."""
    return tuple(
      key
      for key, copy in self._segments[segment].replicas.items()
      if copy.complete
    )

  def used_bytes(self, segment: str) -> int:
    return self._segments[segment].used_bytes

  def check(self) -> None:
    """Raises AssertionError unless both views agree and capacities hold."""
    for name, space in self._segments.items():
      sizes = sum(copy.size_bytes for copy in space.replicas.values())
      assert sizes == space.used_bytes <= space.capacity_bytes, name
      for key, copy in space.replicas.items():
        assert self._objects[key].copies[name] is copy, name
        assert copy.replica.segment == name
    for block in self._objects.values():
      assert block.copies, 'an object without a copy'
      assert set(block.copies) <= set(self._segments)

  def _find(self, key: BlockKey, replica: Replica) -> _Copy | None:
    block = self._objects.get(key)
    copy = block.copies.get(replica.segment) if block else None
    return copy if copy is not None and copy.replica == replica else None

  def _in_use(self, key: BlockKey, now_s: float) -> bool:
    block = self._objects[key]
    return block.lease_until_s >= now_s or any(
      not copy.complete for copy in block.copies.values()
    )

  def _forget(self, key: BlockKey, segment: str) -> None:
    block = self._objects[key]
    copy = block.copies.pop(segment)
    space = self._segments[segment]
    del space.replicas[key]
    space.used_bytes -= copy.size_bytes
    if not block.copies:
      del self._objects[key]

  def _make_room(
    self,
    segment: str,
    size_bytes: int,
    now_s: float,
    keep: Collection[BlockKey],
  ) -> tuple[Evicted, ...]:
    space = self._segments[segment]
    limit = int(space.capacity_bytes * self.high_watermark)
    need = space.used_bytes + size_bytes - limit
    if need <= 0 or size_bytes > space.capacity_bytes:
      return ()
    goal = max(need, int(space.capacity_bytes * self.eviction_ratio))
    victims, freed = [], 0
    for key, copy in space.replicas.items():
      if freed >= goal:
        break
      if key not in keep and not self._in_use(key, now_s):
        victims.append(Evicted(key, copy.replica))
        freed += copy.size_bytes
    for victim in victims:
      self._forget(victim.key, segment)
    return tuple(victims)
