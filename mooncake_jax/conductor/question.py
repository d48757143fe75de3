# SPDX-License-Identifier: Apache-2.0
"""One request to place: what is believed of every prefill instance, as arrays.

A policy answers with `Plans`, alternatives for each instance: how many blocks
to fetch there, from whom, and how good that is. The Conductor takes the best.
Suffixes: A is an alternative, I a prefill instance, X any leading axes. A
source is a row of instances.

A placement has some 50 microseconds for its arrays, about one a call whatever
the number of instances, so calls are counted here: `ndarray.argmin` is one
where `ndarray.min` is two.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.fleet import Fleet
from mooncake_jax.costs.model import Link


class Forecast(NamedTuple):
  """Predicted seconds; arrays of one shape [X, I], or [I] for all of it.

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

  def at(self, i: int, a: int = 0) -> 'Terms':
    """The numbers of instance i, alternative a."""
    return Terms(*(s.item(i) if s.ndim == 1 else s.item(a, i) for s in self))


class Terms(NamedTuple):
  """A `Forecast` of one plan."""

  queue_s: float
  fetch_s: float
  transfer_s: float
  prefill_s: float

  @property
  def ttft_s(self) -> float:
    return self.queue_s + self.transfer_s + self.prefill_s


class Plans(NamedTuple):
  """Alternatives for each instance; the least score wins.

  Of instances with equal ones one is drawn, of equal alternatives of an
  instance the first is taken.

  Attributes:
    fetch_blocks_AI: to be fetched besides the instance's own prefix.
    source_A: from whom; of no meaning where nothing is fetched.
    score_AI: what the policy goes by.
    found: what they would take, where the policy has asked for that.
  """

  fetch_blocks_AI: np.ndarray
  source_A: Sequence[int]
  score_AI: np.ndarray
  found: Forecast | None = None

  @property
  def score_I(self) -> np.ndarray:
    """Of each instance's best alternative."""
    if len(self.score_AI) == 1:
      return self.score_AI[0]
    return np.minimum.reduce(self.score_AI)

  def best(self, i: int) -> tuple[int, int, int]:
    """Instance i's best: which one, how many blocks to fetch, from whom."""
    a = int(self.score_AI[:, i].argmin())
    return a, self.fetch_blocks_AI.item(a, i), self.source_A[a]


@dataclass(frozen=True, eq=False)
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
    accepts_I: who takes requests.
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
  accepts_I: np.ndarray
  remote_blocks: int = 0
  overlap: float = 0.0
  balancing_threshold: float = 2.0
  work_weight: float = 0.0

  def prefill_s(self, prefix_blocks_XI: np.ndarray) -> np.ndarray:
    """EstimatePrefillExecutionTime on a prefix, [..., I]."""
    return self.prompt_s(prefix_blocks_XI)[0]

  def prompt_s(
    self, prefix_blocks_XI: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of prefill on a prefix and of its first chunk, [..., I]."""
    prefill_s, first_chunk_s = self.fleet.prompt_s(
      self.num_tokens, prefix_blocks_XI, self.block_size_tokens
    )
    prefill_s *= self.prefill_factor_I
    first_chunk_s *= self.prefill_factor_I
    return prefill_s, first_chunk_s

  def move_s(
    self, link: Link, num_blocks_XI: np.ndarray, wait: bool = False
  ) -> np.ndarray:
    """Seconds for blocks over each instance's own link, [..., I].

    Nothing to move takes 0 s; with `wait`, what is planned there goes first.
    """
    if not np.count_nonzero(num_blocks_XI):
      return np.zeros(num_blocks_XI.shape)
    seconds_XI = self.fleet.block_s_I[link] * num_blocks_XI
    seconds_XI += self.fleet.latency_s_I[link]
    seconds_XI *= self.transfer_factor_I
    if wait:
      seconds_XI += self.link_wait_s_I[link]
    seconds_XI *= num_blocks_XI > 0
    return seconds_XI

  def copy_line(self, source_A: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds until a fetch's first byte, and of a block, [A, I]."""
    fleet, factor_I = self.fleet, self.transfer_factor_I
    source_A1 = np.array(source_A)[:, None]
    first_s_AI = factor_I * fleet.latency_s_I['copy'][source_A1]
    first_s_AI += self.link_wait_s_I['copy'][source_A1]
    return first_s_AI, factor_I * fleet.block_s_I['copy'][source_A1]

  def least_busy(self, holders: np.ndarray) -> tuple[int, float]:
    """Of some rows the one whose link is free first, and when that is."""
    wait_s_I = self.link_wait_s_I['copy']
    i = holders.item(0)
    if len(holders) > 1:
      i = holders.item(wait_s_I[holders].argmin())
    return i, wait_s_I.item(i)

  def rest_blocks(self, prefix_blocks_XI: np.ndarray) -> np.ndarray:
    """What the remote store has beyond a prefix; whoever prefills reads it."""
    return np.maximum(self.remote_blocks - prefix_blocks_XI, 0)

  @cached_property
  def local_s_I(self) -> np.ndarray:
    """Until each one's own prefix is on its device, links shared."""
    local_s_I = self.move_s('onload', self.host_blocks_I, wait=True)
    if self.has_tiers:
      ssd_s_I = self.move_s('ssd_read', self.ssd_blocks_I, wait=True)
      local_s_I = np.maximum(local_s_I, ssd_s_I)
    return local_s_I

  @property
  def host_blocks_I(self) -> np.ndarray:
    """Of the local ones, those in host memory."""
    if not self.has_tiers:
      return self.local_blocks_I
    return self.local_blocks_I - self.ssd_blocks_I - self.device_blocks_I

  def price(self, plans: Plans) -> Forecast:
    """What the plans would take."""
    if plans.found is not None:
      return plans.found
    return self.forecast(plans.fetch_blocks_AI, plans.source_A)

  def forecast(
    self, fetch_blocks_AI: np.ndarray, source_A: Sequence[int]
  ) -> Forecast:
    """What fetching so many blocks from these sources would give.

    A fetch moves while the request queues and, layer-wise, while its first
    chunk computes; only what is left then delays it.
    """
    fetch_s, prefix_AI = self.local_s_I, self.local_blocks_I + fetch_blocks_AI
    if np.count_nonzero(fetch_blocks_AI):
      first_s_AI, block_s_AI = self.copy_line(source_A)
      block_s_AI *= fetch_blocks_AI
      block_s_AI += first_s_AI
      block_s_AI *= fetch_blocks_AI > 0
      fetch_s = np.maximum(fetch_s, block_s_AI)
    if self.remote_blocks:
      rest_AI = self.rest_blocks(prefix_AI)
      rest_s = self.move_s('remote_read', rest_AI, wait=True)
      fetch_s = np.maximum(fetch_s, rest_s)
      prefix_AI = prefix_AI + rest_AI
    prefill_s, first_chunk_s = self.prompt_s(prefix_AI)
    transfer_s = self._late_s(fetch_s, first_chunk_s)
    return Forecast(self.queue_s_I, fetch_s, transfer_s, prefill_s)

  def _late_s(
    self, fetch_s: np.ndarray, first_chunk_s: np.ndarray
  ) -> np.ndarray:
    """What of a transfer hides neither behind the queue nor compute."""
    if not self.overlap:
      return np.maximum(fetch_s - self.queue_s_I, 0.0)
    # The first layers must be there in any case.
    hidden_s = self.overlap * np.minimum(first_chunk_s, fetch_s)
    hidden_s += self.queue_s_I
    return np.maximum(fetch_s - hidden_s, 0.0)


Policy = Callable[[Question], Plans]
