# SPDX-License-Identifier: Apache-2.0
"""What the store tells of its segments, numbered in the order of its books.

Made right after the Master's answer, so the numbers stand for what the books
say, whenever and in whatever order the events are heard.
"""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Inventory
from mooncake_jax.request import BlockKey

_SEGMENT, _KEY = attrgetter('segment'), attrgetter('key')


class EventLog:
  """Numbers the events of each segment, 1, 2, 3 …"""

  def __init__(self):
    self._told: Counter[str] = Counter()

  def stored(
    self, replicas: Iterable[Replica], now_s: float
  ) -> list[BlocksStored]:
    """Tells that replicas are readable, segment by segment."""
    return [
      BlocksStored(now_s, owner(name), keys, medium(name), self._next(name))
      for name, keys in _by_segment(replicas).items()
    ]

  def evicted(
    self, replicas: Iterable[Replica], now_s: float
  ) -> list[BlocksEvicted]:
    """Tells that replicas are gone, segment by segment."""
    return [
      BlocksEvicted(now_s, owner(name), keys, medium(name), self._next(name))
      for name, keys in _by_segment(replicas).items()
    ]

  def inventory(
    self, segment: str, keys: tuple[BlockKey, ...], now_s: float
  ) -> Inventory:
    """Tells all that a segment holds, after what was told so far."""
    told = self._told[segment]
    return Inventory(now_s, owner(segment), keys, medium(segment), told)

  def _next(self, segment: str) -> int:
    self._told[segment] += 1
    return self._told[segment]


def _by_segment(
  replicas: Iterable[Replica],
) -> dict[str, tuple[BlockKey, ...]]:
  found = [*replicas]
  segments = dict.fromkeys(map(_SEGMENT, found))
  if len(segments) == 1:
    return dict.fromkeys(segments, tuple(map(_KEY, found)))
  return {
    segment: tuple([r.key for r in found if r.segment == segment])
    for segment in segments
  }
