# SPDX-License-Identifier: Apache-2.0
"""What the Master keeps: segments, spans of blocks and a span's copies.

Blocks that were put together are mostly read, leased and let go together. So
what is known of them is kept once a span of a chain, however long it is, and a
span is parted where something comes to hold for some of its blocks alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
import math
from typing import Optional

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import MEDIA
from mooncake_jax.blocks.segments import Medium
from mooncake_jax.request import BlockKey
from mooncake_jax.store.queue import EvictionQueue

# States of a copy. From COMPLETE on it is offered to readers.
OPEN = 0  # between put_start and put_end: its bytes are being written
LEAVING = 1  # read on under a lease that runs, offered to nobody new
COMPLETE = 2
SPARE = 3  # complete, and was offloaded: a lower tier has the blocks too
CONDEMNED = 4  # complete, and no lower tier would take it

# Before every clock's start: no lease, no pin.
NEVER_S = -1e18

LOAD_HALF_LIFE_S = 10.0

_new_replica = partial(tuple.__new__, Replica)


def _replicas(
  segment: str, replica_id: int, keys: tuple[BlockKey, ...]
) -> tuple[Replica, ...]:
  """Of blocks in a row, whose ids go down from the first one's."""
  ids = range(replica_id, replica_id - len(keys), -1)
  return tuple(map(_new_replica, zip(repeat(segment), ids, keys)))


class Copy:
  """A span's replicas in one segment and what eviction policies judge them by.

  Attributes:
    span: whose replicas they are; none once the Master has forgotten them.
    keys: the span's; () then.
    next: the span's next copy, in another segment.
    size_bytes: of one block.
    uses: puts and leased gets of it.
    replica_id: of the first block, the stamp of its making, so never used
      twice; each block has one less than the block before it.
    stamp: of its last use, in the Master's count of uses; position: in the
      chain that was put, in blocks. Both are the last block's, which goes
      first; the block before it has one more and one less.
    tenant: who is charged for it; None: nobody.
  """

  __slots__ = (
    'keys',
    'next',
    'position',
    'replica_id',
    'segment',
    'size_bytes',
    'span',
    'stamp',
    'state',
    'tenant',
    'uses',
  )

  def __init__(
    self,
    span: 'Span',
    segment: 'Segment',
    size_bytes: int,
    replica_id: int,
    stamp: int,
    position: int,
    tenant: str | None,
  ):
    self.replica_id = replica_id
    self.segment = segment
    self.size_bytes = size_bytes
    self.stamp = stamp
    self.position = position
    self.tenant = tenant
    self.state = OPEN
    self.uses = 1
    self.span = span
    self.keys: tuple[BlockKey, ...] = span.keys
    self.next: Copy | None = None

  @property
  def num_bytes(self) -> int:
    return len(self.keys) * self.size_bytes

  @property
  def replicas(self) -> tuple[Replica, ...]:
    """Their names for others, made when asked for: most are never."""
    return _replicas(self.segment.name, self.replica_id, self.keys)

  @property
  def replica(self) -> Replica:
    """The name of a copy of one block."""
    assert len(self.keys) == 1, self.keys
    return Replica(self.segment.name, self.replica_id, self.keys[0])

  def part(self, span: 'Span', count: int) -> 'Copy':
    """Keeps `count` blocks; returns a copy of the others, those of `span`."""
    rest = Copy(
      span,
      self.segment,
      self.size_bytes,
      self.replica_id - count,
      self.stamp,
      self.position,
      self.tenant,
    )
    rest.state, rest.uses = self.state, self.uses
    self.keys = self.span.keys
    self.stamp += len(span.keys)
    self.position -= len(span.keys)
    return rest

  def let_go(self) -> None:
    """The Master has forgotten it."""
    self.keys, self.next = (), None
    del self.span


class Span:
  """Blocks of a chain, one behind the other, that all are alike.

  Attributes:
    keys: at least one.
    first: their copies, linked by `next`; set by whoever makes the span.
      One at least, at most one a segment and nearly always one.
    lease_until_s: end of the last lease granted.
    pinned_until_s: end of their soft pin, inf while hard pinned.
    heat: leased gets, halved at every period of the Master's half-life.
  """

  __slots__ = ('first', 'heat', 'keys', 'lease_until_s', 'pinned_until_s')

  first: Copy

  def __init__(self, keys: tuple[BlockKey, ...]):
    self.keys = keys
    self.lease_until_s = NEVER_S
    self.pinned_until_s = NEVER_S
    self.heat = 0

  def part(self, count: int) -> 'Span':
    """Keeps its first `count` blocks; returns a span of the others."""
    rest = Span(self.keys[count:])
    self.keys = self.keys[:count]
    rest.lease_until_s = self.lease_until_s
    rest.pinned_until_s = self.pinned_until_s
    rest.heat = self.heat
    rest.first = last = self.first.part(rest, count)
    copy = self.first.next
    while copy is not None:
      last.next = last = copy.part(rest, count)
      copy = copy.next
    return rest

  def copies(self) -> Iterator[Copy]:
    copy: Copy | None = self.first
    while copy is not None:
      yield copy
      copy = copy.next

  def copy_in(self, segment: 'Segment') -> Copy | None:
    copy: Copy | None = self.first
    while copy is not None and copy.segment is not segment:
      copy = copy.next
    return copy

  def is_open(self) -> bool:
    """Whether a copy of them is being written, from another or anew."""
    copy: Copy | None = self.first
    while copy is not None and copy.state != OPEN:
      copy = copy.next
    return copy is not None

  def num_readable(self) -> int:
    return sum(copy.state >= COMPLETE for copy in self.copies())

  def num_kept(self) -> int:
    """Those of them that stay until the Master lets them go."""
    return sum(
      copy.state >= COMPLETE and not copy.segment.is_belief
      for copy in self.copies()
    )

  def link(self, copy: Copy) -> None:
    """Adds a copy behind the others."""
    last = self.first
    while last.next is not None:
      last = last.next
    last.next = copy

  def unlink(self, copy: Copy) -> bool:
    """Takes a copy out; False, and nothing done, if it is the only one."""
    if self.first is copy:
      if copy.next is None:
        return False
      self.first = copy.next
      return True
    before = next(other for other in self.copies() if other.next is copy)
    before.next = copy.next
    return True


@dataclass(eq=False, slots=True)
class Segment:
  """Memory of one medium: how much it holds, what goes next, how busy it is.

  Attributes:
    group: whose memory it is; segments of a group are near each other.
    queue: copies that may go, in the policy's order.
    unsaved: those that go to `lower` first; empty without one.
    spare_bytes: of copies that `lower` has too or would not take.
    offloading_bytes: of copies on their way to `lower`.
    num_copies: in blocks, open ones included.
    draining: takes no put any more.
    stuck_until_s: no copy can go before.
    load, load_s: blocks put and read lately, decayed, as of when.
    hits: leased gets of its copies, in blocks.
  """

  name: str
  medium: Medium
  group: str
  capacity_bytes: int
  queue: EvictionQueue[Copy]
  unsaved: EvictionQueue[Copy]
  lower: Optional['Segment'] = None
  used_bytes: int = 0
  spare_bytes: int = 0
  offloading_bytes: int = 0
  num_copies: int = 0
  draining: bool = False
  stuck_until_s: float = -math.inf
  load: float = 0.0
  load_s: float = 0.0
  hits: int = 0

  @property
  def free_bytes(self) -> int:
    return self.capacity_bytes - self.used_bytes

  @property
  def is_belief(self) -> bool:
    """Whether it belongs to others, who evict there without a word."""
    return self.medium == 'remote'

  @property
  def medium_rank(self) -> int:
    return MEDIA.index(self.medium)

  def add_load(self, num_blocks: int, now_s: float) -> None:
    self.load = self.load_at(now_s) + num_blocks
    self.load_s = now_s

  def load_at(self, now_s: float) -> float:
    """Blocks put and read lately."""
    return self.load * 0.5 ** ((now_s - self.load_s) / LOAD_HALF_LIFE_S)

  def copies(self) -> Iterator[Copy]:
    """Its published copies, in no order."""
    yield from self.queue
    yield from self.unsaved
