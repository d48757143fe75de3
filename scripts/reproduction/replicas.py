# SPDX-License-Identifier: Apache-2.0
"""How many instances hold a key, over time, by how often the key is used."""

from collections import Counter
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request

RANKS = (10, 100, 1000, 10_000)
EVERY_S = 30.0


def replicas(
  events: Iterable[object], requests: Sequence[Request]
) -> dict[str, list[int]]:
  """Holders of the key of each rank, every 30 s; none without a store.

  Rank 1 is the key that most requests begin with or pass through; of equally
  used ones the first in the trace comes first.
  """
  uses = Counter(key for request in requests for key in request.block_keys)
  ranked = [key for key, _ in uses.most_common(max(RANKS))]
  rank_of = {ranked[n - 1]: n for n in RANKS if n <= len(ranked)}
  held: dict[BlockKey, set[tuple[str, str]]] = defaultdict(set)
  found: dict[str, list[int]] = {str(n): [] for n in rank_of.values()}
  next_s = EVERY_S
  for event in events:
    if not isinstance(event, BlocksStored | BlocksEvicted):
      continue
    while event.time_s >= next_s:
      for key, n in rank_of.items():
        found[str(n)].append(len(held[key]))
      next_s += EVERY_S
    _apply(event, held, rank_of)
  return {n: counts for n, counts in found.items() if any(counts)}


def _apply(
  event: BlocksStored | BlocksEvicted,
  held: dict[BlockKey, set[tuple[str, str]]],
  rank_of: dict[BlockKey, int],
) -> None:
  place = event.instance, event.tier
  for key in rank_of.keys() & event.keys:
    if isinstance(event, BlocksStored):
      held[key].add(place)
    else:
      held[key].discard(place)
