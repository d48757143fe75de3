# SPDX-License-Identifier: Apache-2.0
"""The paper's four policies (FAST'25 section 4.1 and figure 5).

TTFT of a plan is T_queue + T_transfer + T_prefill. Here T_transfer also counts
bringing the reused prefix to the device, which the paper leaves out, since no
reuse is free. As printed, the three are summed and no link is ever busy.
"""

import numpy as np

from mooncake_jax.conductor.question import Plan
from mooncake_jax.conductor.question import Question


def random(ask: Question) -> list[Plan]:
  """Any instance; reuses what happens to lie there."""
  return [Plan(np.zeros(len(ask.queue_s_I)))]


def load_balancing(ask: Question) -> list[Plan]:
  """The instance with the shortest queue."""
  return [Plan(ask.queue_s_I)]


def cache_aware(ask: Question) -> list[Plan]:
  """The least predicted TTFT with each instance's own prefix only."""
  T_transfer, T_prefill = _own_s(ask, None), ask.own_prompt_s[0]
  return [Plan(ask.queue_s_I + T_transfer + T_prefill)]


def kvcache_centric(ask: Question) -> list[Plan]:
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
  best_len, holders = ask.holders[0] if ask.holders else (0, None)
  # best_len / prefix_len > kvcache_balancing_threshold, without division
  far_I = best_len > ask.balancing_threshold * prefix_len
  if holders is None or not np.count_nonzero(far_I):
    return cache_aware(ask)
  best, _ = ask.least_busy(holders)
  fetch_I = np.where(far_I, best_len - prefix_len, 0)
  T_transfer = ask.move_s('copy', fetch_I) + _own_s(ask, fetch_I)
  T_prefill, _ = ask.prompt_s(ask.with_rest(prefix_len + fetch_I))
  TTFT = T_transfer + ask.queue_s_I + T_prefill
  return [Plan(TTFT, fetch_I, best)]


def _own_s(ask: Question, fetch_I: np.ndarray | None) -> np.ndarray:
  """Seconds for what each reads without being told: its own blocks, and those
  of the remote store beyond them and the fetched ones."""
  own_s_I = ask.move_s('onload', ask.host_blocks_I)
  if ask.has_tiers:
    own_s_I += ask.move_s('ssd_read', ask.ssd_blocks_I)
  if ask.remote_blocks:
    prefix_I = ask.local_blocks_I + (0 if fetch_I is None else fetch_I)
    rest_I = ask.with_rest(prefix_I) - prefix_I
    own_s_I += ask.move_s('remote_read', rest_I)
  return own_s_I
