# SPDX-License-Identifier: Apache-2.0
"""The paper's four policies (FAST'25 section 4.1 and figure 5).

TTFT of a plan is T_queue + T_transfer + T_prefill. Here T_transfer also counts
bringing the reused prefix to the device, which the paper leaves out, since no
reuse is free. As printed, the three are summed and no link is ever busy.
"""

import numpy as np

from mooncake_jax.conductor.question import Plans
from mooncake_jax.conductor.question import Question


def random(ask: Question) -> Plans:
  """Any instance; reuses what happens to lie there."""
  return _local(ask, np.zeros(len(ask.queue_s_I)))


def load_balancing(ask: Question) -> Plans:
  """The instance with the shortest queue."""
  return _local(ask, ask.queue_s_I)


def cache_aware(ask: Question) -> Plans:
  """The least predicted TTFT with each instance's own prefix only."""
  nothing_I = np.zeros_like(ask.local_blocks_I)
  T_transfer, T_prefill = _own_s(ask, nothing_I), _prefill_s(ask, nothing_I)
  return _local(ask, ask.queue_s_I + T_transfer + T_prefill)


def kvcache_centric(ask: Question) -> Plans:
  """Algorithm 1, lines 4-20: fetch the best prefix where it is far longer.

  As printed, above the threshold a transfer is always planned, of all blocks
  that are missing. Holes filled: the printed ratio divides by the local prefix,
  so an empty one counts as far shorter than any (and two empty ones as equal);
  the threshold's value, which the paper does not give, is a parameter; of
  several best instances the one whose link is free first is read from, since
  the paper's FindBestPrefixMatch names just one; and of equal TTFTs one is
  drawn, so that ties do not herd.
  """
  prefix_len = ask.local_blocks_I
  best_len = int(ask.stored_blocks_I.max(initial=0))
  best = best_source(ask, best_len)
  # best_len / prefix_len > kvcache_balancing_threshold, without division
  far_I = best_len > ask.balancing_threshold * prefix_len
  fetch_I = np.where(far_I, best_len - prefix_len, 0)
  T_transfer = ask.move_s('copy', fetch_I) + _own_s(ask, fetch_I)
  T_prefill = _prefill_s(ask, fetch_I)
  TTFT = T_transfer + ask.queue_s_I + T_prefill
  return Plans(fetch_I, np.full(len(fetch_I), best), TTFT)


def best_source(ask: Question, num_blocks: int) -> int:
  """Of the instances that could give so many blocks, the least busy."""
  holders = np.flatnonzero(ask.stored_blocks_I >= num_blocks)
  waits_s = ask.link_wait_s_I['copy'][holders]
  return int(holders[waits_s.argmin()])


def _local(ask: Question, score_I: np.ndarray) -> Plans:
  """Plans that fetch nothing."""
  nothing_I = np.zeros(len(score_I), np.int64)
  return Plans(nothing_I, nothing_I, score_I)


def _prefill_s(ask: Question, fetch_I: np.ndarray) -> np.ndarray:
  prefix_I = ask.local_blocks_I + fetch_I
  return ask.prefill_s(prefix_I + ask.rest_blocks(prefix_I))


def _own_s(ask: Question, fetch_I: np.ndarray) -> np.ndarray:
  """Seconds for what each reads without being told: its own blocks, and those
  of the remote store beyond them and the fetched ones."""
  host_I = ask.local_blocks_I - ask.ssd_blocks_I - ask.device_blocks_I
  rest_I = ask.rest_blocks(ask.local_blocks_I + fetch_I)
  return (
    ask.move_s('onload', host_I)
    + ask.move_s('ssd_read', ask.ssd_blocks_I)
    + ask.move_s('remote_read', rest_I)
  )
