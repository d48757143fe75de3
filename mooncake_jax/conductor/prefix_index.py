# SPDX-License-Identifier: Apache-2.0
"""Which instance is believed to hold which block, and how far a prompt
matches.

Two kinds of belief: `stored` blocks were reported by the store; `expected`
ones belong to a request placed there whose blocks are still to be stored, so
that the next request of the same prefix follows it (FAST'25 section 4.1: the
instance's cache is updated at once). A match ends at the first block an
instance lacks; nothing after it counts.

The index is only ever wrong towards the store, never towards itself: a block
it names in vain is recomputed, one it does not know is not used. So it may
forget, and does where it grows beyond `max_blocks`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import copy
from itertools import groupby

from mooncake_jax.blocks.segments import Medium
from mooncake_jax.conductor.event_order import EventOrder
from mooncake_jax.conductor.holders import EXPECTED
from mooncake_jax.conductor.holders import Holders
from mooncake_jax.conductor.holders import HolderSets
from mooncake_jax.conductor.holders import NOBODY
from mooncake_jax.conductor.holders import SLOT
from mooncake_jax.conductor.matches import Falls
from mooncake_jax.conductor.matches import Match as Match
from mooncake_jax.conductor.matches import Matches
from mooncake_jax.conductor.matches import Run
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory
from mooncake_jax.events import StoreEvent
from mooncake_jax.request import BlockKey


class PrefixIndex:
  """Beliefs about blocks of all instances.

  An instance has a position, from 0 in the order in which it was first named,
  which it keeps; a mask of instances has bit p for the one at position p.

  For speed, ask for groups instead of every instance:

    matches = index.match(keys)
    for usable, slow, fast, mask in matches.groups():
      ...  # all instances of the mask can reuse the same: price it once
    for blocks, mask in matches.sources():
      ...  # longest first: who of the mask can give so many to others
    matches.at(position)  # the Match of one instance
    matches['prefill0']  # by name; matches is a mapping of those that match
  """

  def __init__(self, instances: Sequence[str] = (), max_blocks: int = 1 << 22):
    """Makes an index that believes in nothing.

    Args:
      instances: get positions 0, 1, 2 …; others follow as they are named.
      max_blocks: above this, blocks that no request has matched lately are
        forgotten. Those expected are kept whatever their number.

    Raises:
      ValueError: max_blocks is not positive.
    """
    if max_blocks < 1:
      raise ValueError(f'{max_blocks=} must be >= 1')
    self.max_blocks = max_blocks
    self.names: list[str] = []
    self.positions: dict[str, int] = {}
    self._blocks: dict[BlockKey, Holders] = {}
    self._sets = HolderSets()
    # By position: requests beyond the first that expect a block there.
    self._more: dict[int, dict[BlockKey, int]] = {}
    self._orders: dict[tuple[str, str], EventOrder] = {}
    self._sweep_above = max_blocks
    self._watch_above = max_blocks * 3 // 4
    self._matched: set[BlockKey] = set()
    for name in instances:
      self.position(name)

  def position(self, instance: str) -> int:
    """Where the instance's bit is; gives it one if it is new."""
    position = self.positions.get(instance)
    if position is None:
      position = self.positions[instance] = len(self.names)
      self.names.append(instance)
    return position

  def match(self, keys: Sequence[BlockKey]) -> Matches:
    """How far each instance matches a prompt's blocks, first block first.

    Takes time in the blocks up to the last that anyone matches, and in how
    often the set of holders changes along them.
    """
    alive, length, last = -1, 0, NOBODY
    runs: list[Run] = []
    falls: Falls = []
    for holders in map(self._blocks.get, keys):
      if holders is not last:
        if holders is None:
          break
        still = alive & holders.anyhow
        if still != alive:
          if length:
            falls.append((length, alive ^ still))
          alive = still
          if not alive:
            break
        runs.append((length, holders))
        last = holders
      length += 1
    if length and alive:
      falls.append((length, alive))
    if len(self._blocks) > self._watch_above:
      self._matched.update(keys[:length])
    return Matches(self.positions, self.names, runs, length, falls)

  def observe(self, event: StoreEvent | InstanceLost) -> None:
    """Follows the store; see `EventOrder` for late and repeated events.

    A lost instance is forgotten at once, its events stay in order: the store
    tells of the loss segment by segment, too, with empty inventories.
    """
    if isinstance(event, InstanceLost):
      self.forget(event.instance)
      return
    segment = event.instance, event.tier
    order = self._orders.get(segment)
    if order is None:
      order = self._orders[segment] = EventOrder()
    for ready in order.admit(event):
      self._apply(ready)

  def doubtful(self) -> dict[tuple[str, str], int]:
    """Segments (instance, tier) of which events were lost, and how many.

    Their inventories put the index right.
    """
    orders = self._orders.items()
    return {name: order.num_lost for name, order in orders if order.num_lost}

  def add(
    self, instance: str, keys: Iterable[BlockKey], tier: Medium = 'host'
  ) -> None:
    """Believes that the instance holds these blocks."""
    self._insert(keys, SLOT[tier], 1 << self.position(instance))

  def discard(
    self, instance: str, keys: Iterable[BlockKey], tier: Medium = 'host'
  ) -> None:
    """Forgets blocks; unknown ones are ignored."""
    self._remove(keys, SLOT[tier], 1 << self.position(instance))

  def replace(
    self, instance: str, keys: Iterable[BlockKey], tier: Medium = 'host'
  ) -> None:
    """Believes that the instance holds these blocks on a tier, and no others.

    Takes time in the size of the index.
    """
    slot, bit = SLOT[tier], 1 << self.position(instance)
    keys = dict.fromkeys(keys)
    self._remove([k for k in self._held(slot, bit) if k not in keys], slot, bit)
    self._insert(keys, slot, bit)

  def forget(self, instance: str) -> None:
    """Forgets all that an instance held or was expected to hold.

    Takes time in the size of the index.
    """
    position = self.position(instance)
    for slot in range(len(NOBODY.masks)):
      self._remove(self._held(slot, 1 << position), slot, 1 << position)
    self._more.pop(position, None)

  def expect(self, instance: str, keys: Iterable[BlockKey]) -> None:
    """A request placed there will leave these blocks."""
    position = self.position(instance)
    bit, blocks = 1 << position, self._blocks
    more = self._more.setdefault(position, {})
    for holders, run in groupby(keys, blocks.get):
      if holders is None or not holders.expected & bit:
        after = self._sets.having(holders or NOBODY, EXPECTED, bit)
        blocks.update(dict.fromkeys(run, after))
        continue
      for key in run:
        more[key] = more.get(key, 0) + 1
    self._keep_bounded()

  def unexpect(self, instance: str, keys: Iterable[BlockKey]) -> None:
    """Takes one `expect` back; what was not expected is ignored."""
    position = self.position(instance)
    more = self._more.get(position)
    if more:
      last = []
      for key in keys:
        count = more.pop(key, 0)
        if count > 1:
          more[key] = count - 1
        elif not count:
          last.append(key)
      keys = last
    self._remove(keys, EXPECTED, 1 << position)

  def inventory(self, instance: str, tier: Medium = 'host') -> list[BlockKey]:
    """Blocks the instance is believed to hold on a tier, in no order.

    Takes time in the size of the index.
    """
    return self._held(SLOT[tier], 1 << self.position(instance))

  def __deepcopy__(self, memo: dict[int, object]) -> 'PrefixIndex':
    """One of its own, fast: sets of holders never change and are shared."""
    twin = copy.copy(self)
    twin._blocks, twin._matched = self._blocks.copy(), self._matched.copy()
    for name in ('names', 'positions', '_more', '_orders'):
      setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
    return twin

  def __len__(self) -> int:
    """Number of distinct blocks stored somewhere; counts them."""
    return sum(bool(holders.stored) for holders in self._blocks.values())

  @property
  def num_entries(self) -> int:
    """Blocks it remembers, those that are only expected included."""
    return len(self._blocks)

  @property
  def num_matched(self) -> int:
    """Of these, those matched lately; looked at near the bound only."""
    return len(self._matched)

  @property
  def num_sets(self) -> int:
    """Distinct sets of holders."""
    return len(self._sets)

  def _apply(self, event: StoreEvent) -> None:
    match event:
      case BlocksStored():
        self.add(event.instance, event.keys, event.tier)
      case BlocksEvicted():
        self.discard(event.instance, event.keys, event.tier)
      case Inventory():
        self.replace(event.instance, event.keys, event.tier)

  def _insert(self, keys: Iterable[BlockKey], slot: int, bit: int) -> None:
    blocks, having = self._blocks, self._sets.having
    for holders, run in groupby(keys, blocks.get):
      after = having(holders or NOBODY, slot, bit)
      if after is not holders:
        blocks.update(dict.fromkeys(run, after))
    self._keep_bounded()

  def _remove(self, keys: Iterable[BlockKey], slot: int, bit: int) -> None:
    blocks, lacking = self._blocks, self._sets.lacking
    for holders, run in groupby(keys, blocks.get):
      after = lacking(holders or NOBODY, slot, bit)
      if after is NOBODY:
        gone = [*run]
        for key in gone:
          blocks.pop(key, None)
        self._matched.difference_update(gone)
      elif after is not holders:
        blocks.update(dict.fromkeys(run, after))

  def _held(self, slot: int, bit: int) -> list[BlockKey]:
    blocks = self._blocks.items()
    return [key for key, holders in blocks if holders.masks[slot] & bit]

  def _keep_bounded(self) -> None:
    if len(self._blocks) > self._sweep_above:
      self._sweep()

  def _sweep(self) -> None:
    """Forgets the oldest blocks that none matched since the last time.

    What a request matched is a whole head of its chain, so heads outlive
    tails. An eighth goes at once, so that sweeps are rare.
    """
    excess = len(self._blocks) - self.max_blocks * 7 // 8
    idle, used = self._oldest(excess)
    # Where all were matched the newest go: they hang on the older ones.
    idle += used[len(used) - (excess - len(idle)) :]
    self._matched.clear()
    for key in used:
      self._blocks[key] = self._blocks.pop(key)
    for key in idle:
      del self._blocks[key]
    self._sweep_above = max(self.max_blocks, len(self._blocks) * 9 // 8)

  def _oldest(self, count: int) -> tuple[list[BlockKey], list[BlockKey]]:
    """Up to `count` unmatched blocks, oldest first; the matched on the way."""
    idle: list[BlockKey] = []
    used: list[BlockKey] = []
    for key, holders in self._blocks.items():
      if holders.expected:
        continue
      (used if key in self._matched else idle).append(key)
      if len(idle) == count:
        break
    return idle, used
