# SPDX-License-Identifier: Apache-2.0
"""One request to place: what is believed of every prefill instance, as arrays.

A policy answers with `Plan`s, alternatives for each instance: how many blocks
to fetch there, from whom, and how good that is. The Conductor takes the best.
Suffix I is a prefill instance; a source is a row of instances.

A placement has some 30 microseconds for its arrays, about half a one a call
whatever the number of instances, so calls are counted here: `ndarray.argmin` is
one where `ndarray.min` is four, an array of one axis one where two axes are
two, and what all policies ask is asked once.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.arrays import NO_BLOCKS
from mooncake_jax.conductor.arrays import ZERO
from mooncake_jax.conductor.fleet import Fleet
from mooncake_jax.costs.model import Link


class Forecast(NamedTuple):
  """Predicted seconds, [I].

  Attributes:
    queue_s: until the instance has nothing before it.
    fetch_s: until all of the reused prefix is on the device.
    transfer_s: what of that hides neither behind the queue nor compute.
    prefill_s: from the first chunk's start to the last one's end.
  """

  queue_s: np.ndarray
  fetch_s: np.ndarray
  transfer_s: np.ndarray
  prefill_s: np.ndarray

  @property
  def ttft_s(self) -> np.ndarray:
    return self.queue_s + self.transfer_s + self.prefill_s

  def at(self, i: int) -> 'Terms':
    """The numbers of instance i."""
    return Terms(*[seconds.item(i) for seconds in self])


class Terms(NamedTuple):
  """A `Forecast` of one instance."""

  queue_s: float
  fetch_s: float
  transfer_s: float
  prefill_s: float

  @property
  def ttft_s(self) -> float:
    return self.queue_s + self.transfer_s + self.prefill_s


class Plan(NamedTuple):
  """One way for each instance; the least score wins.

  Attributes:
    score_I: what the policy goes by.
    fetch_blocks_I: to be fetched besides the instance's own prefix; None
      fetches nothing anywhere.
    source: from whom.
    found: what it would take, where the policy has asked for that.
  """

  score_I: np.ndarray
  fetch_blocks_I: np.ndarray | None = None
  source: int = 0
  found: Forecast | None = None

  def fetch_blocks(self, i: int) -> int:
    """Of instance i."""
    return 0 if self.fetch_blocks_I is None else self.fetch_blocks_I.item(i)


def least_score(plans: Sequence[Plan]) -> np.ndarray:
  """Of each instance's best plan, [I]."""
  if len(plans) == 1:
    return plans[0].score_I
  return np.minimum.reduce([plan.score_I for plan in plans])


def best_plan(plans: Sequence[Plan], i: int) -> Plan:
  """Instance i's: the first of equal ones."""
  if len(plans) == 1:
    return plans[0]
  return min(plans, key=lambda plan: plan.score_I.item(i))


@dataclass(eq=False)  # frozen, it would take twice as long to make
class Question:
  """One request, and the beliefs to weigh it with.

  Attributes:
    num_tokens: of the prompt.
    local_blocks_I: prompt blocks each can reuse from its own segments, those
      included that are expected there by the time they are needed.
    holders: how many leading blocks others could fetch now, and from which
      instances, longest first, none twice: [(9, [2, 5]), (4, [0])].
    ssd_blocks_I: of the local ones, those that come from its SSD.
    device_blocks_I: of the local ones, those that need not be moved.
    has_tiers: whether there are any of both.
    queue_s_I: seconds until each could start.
    link_wait_s_I: seconds until each one's end of a link is free.
    prefill_factor_I, transfer_factor_I: online corrections of the costs.
    able_I: who may take the request.
    remote_blocks: leading blocks in the remote store, which no instance owns.
    overlap: share of a first chunk's compute that hides a transfer
      (layer-wise streaming; 0 where a chunk waits for its whole prefix).
    balancing_threshold: `kvcache_balancing_threshold`: how much longer the
      best prefix must be than the local one to be worth a fetch; >= 1.
    work_weight: see `policies.cost_based`.
  """

  num_tokens: int
  block_size_tokens: int
  fleet: Fleet
  local_blocks_I: np.ndarray
  holders: Sequence[tuple[int, np.ndarray]]
  ssd_blocks_I: np.ndarray
  device_blocks_I: np.ndarray
  has_tiers: bool
  queue_s_I: np.ndarray
  link_wait_s_I: Mapping[Link, np.ndarray]
  prefill_factor_I: np.ndarray
  transfer_factor_I: np.ndarray
  able_I: np.ndarray
  remote_blocks: int = 0
  overlap: float = 0.0
  balancing_threshold: float = 2.0
  work_weight: float = 0.0

  # Worked out once, when asked for; `cached_property` takes a lock each time.
  _own: tuple[np.ndarray, np.ndarray] | None = field(default=None, init=False)
  _local_s_I: np.ndarray | None = field(default=None, init=False)

  @property
  def own_prompt_s(self) -> tuple[np.ndarray, np.ndarray]:
    """`prompt_s` where nothing is fetched from other instances."""
    if self._own is None:
      self._own = self.prompt_s(self.with_rest(self.local_blocks_I))
    return self._own

  def prompt_s(
    self, prefix_blocks_I: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of prefill on a prefix and of its first chunk, [I] both.

    The first is EstimatePrefillExecutionTime.
    """
    prefill_s, first_chunk_s = self.fleet.prompt_s(
      self.num_tokens, prefix_blocks_I, self.block_size_tokens
    )
    prefill_s *= self.prefill_factor_I
    first_chunk_s *= self.prefill_factor_I
    return prefill_s, first_chunk_s

  def move_s(
    self, link: Link, num_blocks_I: np.ndarray, wait: bool = False
  ) -> np.ndarray:
    """Seconds for blocks over each instance's own link, [I].

    Nothing to move takes 0 s; with `wait`, what is planned there goes first.
    """
    moved = np.count_nonzero(num_blocks_I)
    if not moved:
      return np.zeros(len(num_blocks_I))
    seconds_I = self.fleet.block_s_I[link] * num_blocks_I
    seconds_I += self.fleet.latency_s_I[link]
    seconds_I *= self.transfer_factor_I
    if wait:
      seconds_I += self.link_wait_s_I[link]
    if moved < len(num_blocks_I):
      seconds_I[num_blocks_I == NO_BLOCKS] = ZERO
    return seconds_I

  def copy_s(self, num_blocks_I: np.ndarray, source: int) -> np.ndarray:
    """Seconds for blocks from a source, its link shared, [I]."""
    first_s_I, block_s_I = self.copy_line(source)
    block_s_I *= num_blocks_I
    block_s_I += first_s_I
    block_s_I[num_blocks_I == NO_BLOCKS] = ZERO
    return block_s_I

  def copy_line(self, source: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds until a fetch's first byte, and of a block, [I] both."""
    fleet, factor_I = self.fleet, self.transfer_factor_I
    first_s_I = factor_I * fleet.latency_s_I['copy'].item(source)
    first_s_I += self.link_wait_s_I['copy'].item(source)
    return first_s_I, factor_I * fleet.block_s_I['copy'].item(source)

  def copies_pay(self, source: int) -> bool:
    """Whether a block is everywhere copied from there sooner than computed.

    What of a copy hides behind the first chunk is not counted twice.
    """
    slow = self.transfer_factor_I.argmax()
    fast = self.prefill_factor_I.argmin()
    copied_s = self.transfer_factor_I.item(slow) * self.fleet.block_s_I[
      'copy'
    ].item(source)
    computed_s = self.prefill_factor_I.item(fast) * self.fleet.computed_block_s
    return copied_s <= (1 - self.overlap) * computed_s

  def least_busy(self, holders: np.ndarray) -> tuple[int, float]:
    """Of some rows the one whose link is free first, and when that is."""
    wait_s_I = self.link_wait_s_I['copy']
    i = holders.item(0)
    if len(holders) > 1:
      i = holders.item(wait_s_I[holders].argmin())
    return i, wait_s_I.item(i)

  def with_rest(self, prefix_blocks_I: np.ndarray) -> np.ndarray:
    """A prefix and what the remote store has beyond; whoever prefills reads
    that."""
    if not self.remote_blocks:
      return prefix_blocks_I
    return np.maximum(prefix_blocks_I, self.remote_blocks)

  @property
  def local_s_I(self) -> np.ndarray:
    """Until each one's own prefix is on its device, links shared."""
    if self._local_s_I is None:
      self._local_s_I = self._onload_s()
    return self._local_s_I

  def _onload_s(self) -> np.ndarray:
    local_s_I = self.move_s('onload', self.host_blocks_I, wait=True)
    if self.has_tiers:
      ssd_s_I = self.move_s('ssd_read', self.ssd_blocks_I, wait=True)
      np.maximum(local_s_I, ssd_s_I, out=local_s_I)
    return local_s_I

  def least(self, some_I: np.ndarray) -> float:
    """The least number of those who may take the request."""
    if np.count_nonzero(self.able_I) < len(some_I):
      some_I = some_I[self.able_I]
    return some_I.item(some_I.argmin()) if len(some_I) else np.inf

  @property
  def host_blocks_I(self) -> np.ndarray:
    """Of the local ones, those in host memory."""
    if not self.has_tiers:
      return self.local_blocks_I
    return self.local_blocks_I - self.ssd_blocks_I - self.device_blocks_I

  def price(self, plan: Plan) -> Forecast:
    """What the plan would take."""
    if plan.found is not None:
      return plan.found
    return self.forecast(plan.fetch_blocks_I, plan.source)

  def forecast(
    self, fetch_blocks_I: np.ndarray | None = None, source: int = 0
  ) -> Forecast:
    """What fetching so many blocks from this source would give.

    A fetch moves while the request queues and, layer-wise, while its first
    chunk computes; only what is left then delays it.
    """
    fetch_s, local_I = self.local_s_I, self.local_blocks_I
    if fetch_blocks_I is not None:
      copy_s = self.copy_s(fetch_blocks_I, source)
      fetch_s = np.maximum(fetch_s, copy_s, out=copy_s)
      local_I = local_I + fetch_blocks_I
    prefix_I = self.with_rest(local_I)
    if self.remote_blocks:
      rest_s = self.move_s('remote_read', prefix_I - local_I, wait=True)
      fetch_s = np.maximum(fetch_s, rest_s)
    prefill_s, first_chunk_s = (
      self.own_prompt_s if fetch_blocks_I is None else self.prompt_s(prefix_I)
    )
    transfer_s = self._late_s(fetch_s, first_chunk_s)
    return Forecast(self.queue_s_I, fetch_s, transfer_s, prefill_s)

  def _late_s(
    self, fetch_s: np.ndarray, first_chunk_s: np.ndarray
  ) -> np.ndarray:
    """What of a transfer hides neither behind the queue nor compute."""
    late_s = fetch_s - self.queue_s_I
    if self.overlap:
      # The first layers must be there in any case.
      hidden_s = np.minimum(first_chunk_s, fetch_s)
      hidden_s *= self.overlap
      late_s -= hidden_s
    return np.maximum(late_s, ZERO, out=late_s)


Policy = Callable[[Question], Sequence[Plan]]
