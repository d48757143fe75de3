# SPDX-License-Identifier: Apache-2.0
"""One request to place: what is believed of every prefill instance, as arrays.

A policy answers with `Plans`, one an instance: how many blocks to fetch there,
from whom, and how good that is. The Conductor takes the best. Suffixes: I is a
prefill instance, X any leading axes. A source is a row of instances.
"""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.fleet import Fleet
from mooncake_jax.costs.model import Link


class Forecast(NamedTuple):
  """Predicted seconds; arrays of one shape, or [I] for all of it.

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

  def choose(self, best: tuple[np.ndarray, np.ndarray]) -> 'Forecast':
    """Of arrays [S, I] the one entry for each I at `best`, (rows, columns)."""
    return Forecast(*(s[best] if s.ndim == 2 else s for s in self))

  def at(self, i: int) -> 'Terms':
    """The numbers of instance i, of arrays [I]."""
    return Terms(*(float(seconds_I[i]) for seconds_I in self))


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
  """A plan for each instance; the least score wins, of equals one is drawn.

  Attributes:
    fetch_blocks_I: to be fetched besides the instance's own prefix.
    source_I: from whom; of no meaning where nothing is fetched.
    score_I: what the policy goes by.
    found: what they would take, where the policy has asked for that.
  """

  fetch_blocks_I: np.ndarray
  source_I: np.ndarray
  score_I: np.ndarray
  found: Forecast | None = None


@dataclass(frozen=True, eq=False)
class Question:
  """One request, and the beliefs to weigh it with.

  Attributes:
    num_tokens: of the prompt.
    local_blocks_I: prompt blocks each can reuse from its own segments, those
      included that are expected there by the time they are needed.
    stored_blocks_I: leading blocks that others could fetch from it now.
    ssd_blocks_I: of the local ones, those that come from its SSD.
    device_blocks_I: of the local ones, those that need not be moved.
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
  stored_blocks_I: np.ndarray
  ssd_blocks_I: np.ndarray
  device_blocks_I: np.ndarray
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
    return self.prefill_factor_I * self.fleet.prompt_s(
      self.num_tokens, prefix_blocks_XI, self.block_size_tokens
    )

  def move_s(
    self, link: Link, num_blocks_XI: np.ndarray, wait: bool = False
  ) -> np.ndarray:
    """Seconds for blocks over each instance's own link, [..., I].

    Nothing to move takes 0 s; with `wait`, what is planned there goes first.
    """
    if not num_blocks_XI.any():
      return np.zeros(num_blocks_XI.shape)
    fleet = self.fleet
    seconds_XI = self.transfer_factor_I * (
      fleet.latency_s_I[link] + fleet.block_s_I[link] * num_blocks_XI
    )
    if wait:
      seconds_XI = seconds_XI + self.link_wait_s_I[link]
    return np.where(num_blocks_XI > 0, seconds_XI, 0.0)

  def copy_line(self, source_X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds until a fetch's first byte, and of a block: [X, I] of [X, 1]."""
    fleet, factor_I = self.fleet, self.transfer_factor_I
    latency_s = factor_I * fleet.latency_s_I['copy'][source_X]
    return (
      self.link_wait_s_I['copy'][source_X] + latency_s,
      factor_I * fleet.block_s_I['copy'][source_X],
    )

  def rest_blocks(self, prefix_blocks_XI: np.ndarray) -> np.ndarray:
    """What the remote store has beyond a prefix; whoever prefills reads it."""
    return np.maximum(self.remote_blocks - prefix_blocks_XI, 0)

  @cached_property
  def local_s_I(self) -> np.ndarray:
    """Until each one's own prefix is on its device, links shared."""
    host_I = self.local_blocks_I - self.ssd_blocks_I - self.device_blocks_I
    local_s_I = self.move_s('onload', host_I, wait=True)
    if self.ssd_blocks_I.any():
      ssd_s_I = self.move_s('ssd_read', self.ssd_blocks_I, wait=True)
      local_s_I = np.maximum(local_s_I, ssd_s_I)
    return local_s_I

  def price(self, plans: Plans, i: int) -> Terms:
    """What the plan of instance i would take."""
    if plans.found is not None:
      return plans.found.at(i)
    return self.forecast(plans.fetch_blocks_I, plans.source_I).at(i)

  def forecast(
    self, fetch_blocks_XI: np.ndarray, source_X: np.ndarray
  ) -> Forecast:
    """What fetching so many blocks from these sources would give.

    A fetch moves while the request queues and, layer-wise, while its first
    chunk computes; only what is left then delays it.
    """
    fetch_s = self.local_s_I
    if fetch_blocks_XI.any():
      first_s, block_s = self.copy_line(source_X)
      copy_s = np.where(
        fetch_blocks_XI > 0, first_s + block_s * fetch_blocks_XI, 0.0
      )
      fetch_s = np.maximum(fetch_s, copy_s)
    prefix_XI = self.local_blocks_I + fetch_blocks_XI
    if self.remote_blocks:
      rest_XI = self.rest_blocks(prefix_XI)
      rest_s = self.move_s('remote_read', rest_XI, wait=True)
      fetch_s = np.maximum(fetch_s, rest_s)
      prefix_XI = prefix_XI + rest_XI
    prefill_s = self.prefill_s(prefix_XI)
    hidden_s = self.queue_s_I + self._first_chunk_s(prefix_XI, prefill_s)
    transfer_s = np.maximum(fetch_s - hidden_s, 0.0)
    if self.overlap:  # the first layers must be there in any case
      first_s = (1 - self.overlap) * fetch_s - self.queue_s_I
      transfer_s = np.maximum(transfer_s, first_s)
    return Forecast(self.queue_s_I, fetch_s, transfer_s, prefill_s)

  def _first_chunk_s(
    self, prefix_blocks_XI: np.ndarray, prefill_s_XI: np.ndarray
  ) -> np.ndarray | float:
    """The part of the first chunk's compute that hides a transfer."""
    if not self.overlap:
      return 0.0
    new_tokens = self.num_tokens - prefix_blocks_XI * self.block_size_tokens
    share = np.minimum(self.fleet.chunk_tokens_I / new_tokens, 1.0)
    return self.overlap * share * prefill_s_XI


Policy = Callable[[Question], Plans]
