# SPDX-License-Identifier: Apache-2.0
"""Puts one segment's events back in the order in which they happened.

The store numbers what it tells of a segment, 1, 2, 3 … (`seq`). A repeated
event is dropped, an early one waits for those before it. So any order of
arrival, with any repetition, ends in the same belief. An event that never
comes is given up once `max_waiting` wait for it, or one has for `GIVE_UP_S`:
from then on the belief may be wrong until the segment's inventory is heard,
which puts it right.
"""

from collections.abc import Iterable

from mooncake_jax.events import Inventory
from mooncake_jax.events import StoreEvent

MAX_WAITING = 1024
# By when the events happened; far more than they overtake each other by.
GIVE_UP_S = 5.0


class EventOrder:
  """The order of one segment's events.

  Attributes:
    seq: of the last event that was let through.
    num_lost: events given up since the last inventory.
  """

  __slots__ = ('_max_waiting', '_waiting', 'num_lost', 'seq')

  def __init__(self, max_waiting: int = MAX_WAITING):
    self._max_waiting = max_waiting
    self._waiting: dict[int, StoreEvent] = {}
    self.seq = 0
    self.num_lost = 0

  def admit(self, event: StoreEvent) -> Iterable[StoreEvent]:
    """What is to be applied now, in order; nothing if it comes early or late.

    An event without a number is applied as it comes.
    """
    seq = event.seq
    if seq is None:
      return (event,)
    if isinstance(event, Inventory):
      return self._restart(event, seq)
    if seq <= self.seq:
      return ()
    if seq == self.seq + 1 and not self._waiting:
      self.seq = seq
      return (event,)
    self._waiting[seq] = event
    longest = next(iter(self._waiting.values()))
    waited_s = event.time_s - longest.time_s
    if len(self._waiting) > self._max_waiting or waited_s > GIVE_UP_S:
      self._give_up()
    return self._follow()

  def _restart(self, event: Inventory, seq: int) -> Iterable[StoreEvent]:
    """An inventory holds all up to its number; an older one is worth less."""
    if seq < self.seq:
      return ()
    self.seq, self.num_lost = seq, 0
    self._waiting = {n: e for n, e in self._waiting.items() if n > seq}
    return (event, *self._follow())

  def _follow(self) -> list[StoreEvent]:
    following = []
    while (event := self._waiting.pop(self.seq + 1, None)) is not None:
      self.seq += 1
      following.append(event)
    return following

  def _give_up(self) -> None:
    first = min(self._waiting)
    self.num_lost += first - self.seq - 1
    self.seq = first - 1
