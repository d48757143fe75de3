# SPDX-License-Identifier: Apache-2.0
"""Where to prefill: the paper's four policies, functions of one signature.

`Question` has what the Conductor believes, `Choice` what it decides. TTFT of
a choice is T_queue + T_transfer + T_prefill (FAST'25 Algorithm 1). Here
T_transfer also counts bringing the reused prefix to the device, which the
paper leaves out, since no reuse is free.
"""

from collections.abc import Callable
from dataclasses import dataclass
import random as random_lib

from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link


@dataclass(frozen=True)
class Candidate:
  """A prefill instance as believed.

  Attributes:
    prefix_blocks: prompt blocks it can reuse from its own segment.
    stored_blocks: of them, those another instance could fetch now.
    queue_s: seconds until it could start.
    device_blocks: of the prefix blocks, those that need not be moved.
    ssd_blocks: of the prefix blocks, those that come from its SSD.
  """

  instance: str
  prefix_blocks: int
  stored_blocks: int
  queue_s: float
  ssd_blocks: int = 0
  device_blocks: int = 0


@dataclass(frozen=True)
class Question:
  """One request to place, and the costs to weigh it with.

  Attributes:
    num_tokens: of the prompt.
    store_blocks: of the prompt, those that a store of no instance has; any
      instance may read them there.
    balancing_threshold: `kvcache_balancing_threshold`: how much longer the
      best prefix must be than the local one to be worth a fetch; >= 1.
  """

  num_tokens: int
  candidates: tuple[Candidate, ...]
  costs: CostModel
  block_size_tokens: int
  block_bytes: int
  chunk_tokens: int
  balancing_threshold: float
  rng: random_lib.Random
  store_blocks: int = 0

  def price(self, at: Candidate, fetch: Candidate | None = None) -> 'Choice':
    """Costs of prefilling at `at`, with the rest of the prefix fetched."""
    local = at.prefix_blocks
    extra = max(fetch.stored_blocks - local, 0) if fetch else 0
    stored = max(self.store_blocks - local - extra, 0)
    prefix = (local + extra + stored) * self.block_size_tokens
    transfer_s = (
      self._transfer_s(local - at.ssd_blocks - at.device_blocks, 'onload')
      + self._transfer_s(at.ssd_blocks, 'ssd_read')
      + self._transfer_s(extra, 'copy')
      + self._transfer_s(stored, 'remote_read')
    )
    return Choice(
      at.instance,
      local,
      extra,
      fetch.instance if fetch and extra else None,
      at.queue_s,
      transfer_s,
      self.costs.prompt_s(self.num_tokens, prefix, self.chunk_tokens),
    )

  def _transfer_s(self, num_blocks: int, link: Link) -> float:
    if not num_blocks:
      return 0.0
    return self.costs.transfer_s(num_blocks * self.block_bytes, link)


@dataclass(frozen=True)
class Choice:
  """A prefill instance, the prefix it reuses and the predicted terms."""

  instance: str
  local_blocks: int
  fetch_blocks: int
  fetch_from: str | None
  queue_s: float
  transfer_s: float
  prefill_s: float

  @property
  def ttft_s(self) -> float:
    return self.queue_s + self.transfer_s + self.prefill_s


Policy = Callable[[Question], Choice]


def random(question: Question) -> Choice:
  """Any instance; reuses what happens to lie there."""
  return question.price(question.rng.choice(question.candidates))


def load_balancing(question: Question) -> Choice:
  """The instance with the shortest queue; ties are drawn."""
  return question.price(
    _least(question, question.candidates, lambda at: at.queue_s)
  )


def cache_aware(question: Question) -> Choice:
  """The least predicted TTFT with each instance's own prefix only."""
  return _least(
    question,
    [question.price(at) for at in question.candidates],
    lambda choice: choice.ttft_s,
  )


def kvcache_centric(question: Question) -> Choice:
  """Algorithm 1, lines 4-20: fetch the best prefix where it is far longer.

  As printed, above the threshold a transfer is always planned. Filled in: an
  empty local prefix counts as far shorter than any (the paper divides by it),
  and of equal TTFTs one is drawn, so that ties do not herd.
  """
  best = max(question.candidates, key=lambda at: at.stored_blocks)
  choices = []
  for at in question.candidates:
    if _ratio(best.stored_blocks, at.prefix_blocks) > (
      question.balancing_threshold
    ):
      choices.append(question.price(at, fetch=best))
    else:
      choices.append(question.price(at))
  return _least(question, choices, lambda choice: choice.ttft_s)


POLICIES: dict[str, Policy] = {
  'random': random,
  'load_balancing': load_balancing,
  'cache_aware': cache_aware,
  'kvcache_centric': kvcache_centric,
}


def _ratio(best_prefix: int, prefix: int) -> float:
  """best / local; infinite where only the local prefix is empty."""
  if prefix:
    return best_prefix / prefix
  return float('inf') if best_prefix else 1.0


def _least(question: Question, items, cost):
  """The item of least cost; one drawn among equals."""
  costs = [cost(item) for item in items]
  least = min(costs)
  return question.rng.choice(
    [item for item, c in zip(items, costs) if c == least]
  )
