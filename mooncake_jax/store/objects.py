# SPDX-License-Identifier: Apache-2.0
"""What the Master keeps: segments, blocks and a block's copies.

Few small objects a key, millions of times: a block links its copies, at most
one a segment and nearly always one, so it needs neither dict nor tuple.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
SPARE = 3  # complete, and was offloaded: a lower tier has the block too
CONDEMNED = 4  # complete, and no lower tier would take it

# Before every clock's start: no lease, no pin.
NEVER_S = -1e18

LOAD_HALF_LIFE_S = 10.0


class Copy:
  """One replica and what eviction policies judge it by.

  Attributes:
    block: None once the Master has forgotten the copy.
    next: the block's next copy, in another segment.
    uses: puts and leased gets of it.
    replica_id: the stamp of its making, so never used twice.
    stamp: of its last use, in the Master's count of uses.
    position: of its block in the chain that was put, in blocks.
    tenant: who is charged for it; None: nobody.
  """

  __slots__ = (
    'block',
    'next',
    'position',
    'replica_id',
    'segment',
    'size_bytes',
    'stamp',
    'state',
    'tenant',
    'uses',
  )

  def __init__(
    self,
    block: 'Block',
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
    self.block: Block | None = block
    self.next: Copy | None = None

  @property
  def key(self) -> BlockKey:
    assert self.block is not None, 'forgotten'
    return self.block.key

  @property
  def replica(self) -> Replica:
    """Its name for others, made when asked for: most are never."""
    return Replica(self.segment.name, self.replica_id, self.key)


class Block:
  """A key's copies and what holds them.

  Attributes:
    first: its copies, linked by `next`; set by whoever makes the block.
    lease_until_s: end of the last lease granted.
    pinned_until_s: end of its soft pin, inf while hard pinned.
    heat: leased gets, halved at every period of the Master's half-life.
  """

  __slots__ = ('first', 'heat', 'key', 'lease_until_s', 'pinned_until_s')

  first: Copy

  def __init__(self, key: BlockKey):
    self.key = key
    self.lease_until_s = NEVER_S
    self.pinned_until_s = NEVER_S
    self.heat = 0

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
    """Whether a copy of it is being written, from another or anew."""
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
    num_copies: open ones included.
    draining: takes no put any more.
    stuck_until_s: no copy can go before.
    load, load_s: blocks put and read lately, decayed, as of when.
    hits: leased gets of its copies.
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
