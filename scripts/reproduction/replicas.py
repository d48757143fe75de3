# SPDX-License-Identifier: Apache-2.0
"""How many instances hold a key, over time, by how often the key is used."""

from collections import Counter
from collections import defaultdict
from collections.abc import Sequence

from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Event
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request

RANKS = (10, 100, 1000, 10_000)
EVERY_S = 30.0


class Replicas:
  """Counts the holders of the key of each rank as events come, every 30 s.

  Rank 1 is the key that most requests have among theirs; of equally used ones
  the first in the trace comes first.
  """

  def __init__(self, requests: Sequence[Request]):
    uses = Counter(key for request in requests for key in request.block_keys)
    ranked = [key for key, _ in uses.most_common(max(RANKS))]
    self._rank = {ranked[n - 1]: n for n in RANKS if n <= len(ranked)}
    self._held: dict[BlockKey, set[tuple[str, str]]] = defaultdict(set)
    self._next_s = EVERY_S
    self._counts: dict[int, list[int]] = {n: [] for n in self._rank.values()}

  def hear(self, event: Event) -> None:
    """Takes the next event; only those of blocks matter."""
    if not isinstance(event, BlocksStored | BlocksEvicted):
      return
    while event.time_s >= self._next_s:
      for key, n in self._rank.items():
        self._counts[n].append(len(self._held[key]))
      self._next_s += EVERY_S
    place = event.instance, event.tier
    for key in self._rank.keys() & event.keys:
      if isinstance(event, BlocksStored):
        self._held[key].add(place)
      else:
        self._held[key].discard(place)

  @property
  def counts(self) -> dict[str, list[int]]:
    """By rank; nothing of keys that were never stored."""
    return {str(n): found for n, found in self._counts.items() if any(found)}
