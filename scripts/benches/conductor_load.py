# SPDX-License-Identifier: Apache-2.0
"""A cluster that only tells: events of placed requests, as predicted.

What a Conductor hears of a cluster is made from its own predictions, at little
cost, so that its own time can be measured at any size.
"""

from collections import Counter
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Iterator
import heapq
import itertools

from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Event
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.request import TokenSegment

STEPS = 32  # decode steps that are told at once
HANDOFF_S = 0.05

Due = Callable[[], list[Event]]


class ToldCluster:
  """Prefill queues, caches with their evictions, and decode in equal steps."""

  def __init__(self, capacity_blocks: int, chunk_blocks: int):
    """An idle cluster.

    Args:
      capacity_blocks: of one prefill instance.
      chunk_blocks: stored at once.
    """
    self._capacity_blocks = capacity_blocks
    self._chunk_blocks = chunk_blocks
    self._order = itertools.count()
    self._due: list[tuple[float, int, Due]] = []
    self._free_s: dict[str, float] = {}
    self._told: Counter[str] = Counter()
    self._caches: dict[str, OrderedDict[BlockKey, None]] = {}

  def submit(self, request: Request, placement: Placement) -> None:
    """Takes as long for a request as was predicted."""
    prefill, keys = placement.prefill, request.block_keys
    about = request.request_id, placement.attempt
    start_s = max(request.arrival_s, self._free_s.get(prefill, 0.0))
    took_s = placement.transfer_s + placement.prefill_s
    done_s = self._free_s[prefill] = start_s + took_s
    self._tell(start_s, PrefixFetched(start_s, *about, prefill, start_s))
    chunks = range(0, len(keys), self._chunk_blocks)
    for i, first in enumerate(chunks):
      time_s = start_s + took_s * (i + 1) / len(chunks)
      stop = first + self._chunk_blocks
      self._push(time_s, self._storing(time_s, prefill, keys[:stop]))
    self._tell(done_s, PrefillDone(done_s, *about, prefill, start_s))
    self._decode(request, placement, done_s)

  def until(self, now_s: float) -> list[Event]:
    """What happens up to now, in order."""
    events: list[Event] = []
    while self._due and self._due[0][0] <= now_s:
      events += heapq.heappop(self._due)[2]()
    return events

  def _decode(
    self, request: Request, placement: Placement, time_s: float
  ) -> None:
    key, decode = (request.request_id, placement.attempt), placement.decode
    about = *key, decode
    first = Emitted((key,), TokenSegment(time_s, 0.0, 1))
    self._tell(time_s, TokensEmitted(time_s, decode, first))
    time_s += HANDOFF_S
    self._tell(time_s, KVArrived(time_s, *about))
    for done in range(1, request.max_output_tokens, STEPS):
      count = min(STEPS, request.max_output_tokens - done)
      segment = TokenSegment(time_s, placement.tbt_s, count)
      emitted = Emitted((key,), segment)
      time_s += count * placement.tbt_s
      self._tell(time_s, TokensEmitted(time_s, decode, emitted))
    self._tell(time_s, Finished(time_s, *about, request.max_output_tokens))

  def _tell(self, time_s: float, event: Event) -> None:
    self._push(time_s, lambda: [event])

  def _push(self, time_s: float, due: Due) -> None:
    heapq.heappush(self._due, (time_s, next(self._order), due))

  def _storing(
    self, time_s: float, instance: str, keys: tuple[BlockKey, ...]
  ) -> Due:
    return lambda: list(self._store(time_s, instance, keys))

  def _store(
    self, time_s: float, instance: str, keys: tuple[BlockKey, ...]
  ) -> Iterator[Event]:
    """What is new is stored, what is oldest goes: tails before heads."""
    cache = self._caches.setdefault(instance, OrderedDict())
    new = tuple(key for key in keys if key not in cache)
    for key in reversed(keys):
      cache[key] = None
      cache.move_to_end(key)
    excess = len(cache) - max(self._capacity_blocks, len(keys))
    gone = tuple(cache.popitem(last=False)[0] for _ in range(excess))
    for kind, some in ((BlocksStored, new), (BlocksEvicted, gone)):
      if some:
        self._told[instance] += 1
        yield kind(time_s, instance, some, 'host', self._told[instance])
