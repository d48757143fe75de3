# SPDX-License-Identifier: Apache-2.0
"""cost_based: the least predicted TTFT over reuse, fetch and recompute.

Differs from Algorithm 1: it takes no threshold but compares what each way
would give; sources are other instances, whatever the medium, each with the
queue on its link (what the remote store has beyond is read anyway); a transfer
costs what neither queue nor compute hides; and it may fetch only a leading
part of a prefix.

That part: transfer grows by a constant a block, and what a block saves grows
with its place in the prompt. So TTFT of a fetch is least with no block, with
all of them, or with as many as arrive while the request queues anyway.

Greedy TTFT ignores that a request's compute delays those after it. Where all
instances are busy a plan's score therefore adds `work_weight` seconds a second
of prefill: of two plans that are about as fast the one that computes less wins,
which keeps requests where their prefix is and queues shorter for all. Where one
is idle, compute delays nobody, and the price is none.
"""

from collections.abc import Iterator

import numpy as np

from mooncake_jax.conductor.question import Forecast
from mooncake_jax.conductor.question import Plan
from mooncake_jax.conductor.question import Question

MAX_SOURCES = 3


def cost_based(ask: Question) -> list[Plan]:
  """The least predicted TTFT, with a price on compute."""
  found = ask.forecast()
  weight = _weight(ask, found)
  plans = [Plan(_score(found, weight), found=found)]
  for source, blocks in _sources(ask):
    fetch_I = np.maximum(blocks - ask.local_blocks_I, 0)
    found = ask.forecast(fetch_I, source)
    plans.append(Plan(_score(found, weight), fetch_I, source, found))
  least_s = min(ask.least(plan.score_I) for plan in plans)
  return plans + [
    part for plan in plans[1:] for part in _partial(ask, plan, weight, least_s)
  ]


def _weight(ask: Question, found: Forecast) -> float:
  """The price of compute: in full from a queue of one prompt everywhere on."""
  least_s = ask.least(ask.queue_s_I)
  if not least_s:
    return 0.0
  prefill_s = found.prefill_s
  longest_s = prefill_s.item(prefill_s.argmax())
  return ask.work_weight * min(least_s / longest_s, 1.0)


def _score(found: Forecast, weight: float) -> np.ndarray:
  score_I = found.ttft_s
  if weight:
    score_I += weight * found.prefill_s
  return score_I


def _sources(ask: Question) -> Iterator[tuple[int, int]]:
  """The longest prefixes that can be had, best link first.

  Of each length the holder whose link is free first; lengths from the longest
  down, as a shorter one at an idle source may be there sooner.
  """
  found, least_wait_s, local_I = 0, np.inf, ask.local_blocks_I
  least = local_I.item(local_I.argmin())
  for longest, holders in ask.holders:
    if longest <= least or not least_wait_s or found == MAX_SOURCES:
      break
    source, wait_s = ask.least_busy(holders)
    if wait_s < least_wait_s:
      yield source, longest
      found, least_wait_s = found + 1, wait_s


def _partial(
  ask: Question, plan: Plan, weight: float, least_s: float
) -> Iterator[Plan]:
  """A fetch of as many blocks as are hidden besides, where that may win.

  No more than the source has: what is late may be the own prefix only. Such a
  plan takes at least the queue and the prefill on the whole prefix.
  """
  found, fetch_I = plan.found, plan.fetch_blocks_I
  assert found is not None and fetch_I is not None
  if ask.copies_pay(plan.source):
    return  # then all blocks are better than a part of them
  if ask.least(plan.score_I - found.transfer_s) >= least_s:
    return
  first_s_I, block_s_I = ask.copy_line(plan.source)
  part_I = (found.fetch_s - found.transfer_s - first_s_I) / block_s_I
  part_I = np.clip(part_I.astype(np.int64), 0, fetch_I)
  if np.count_nonzero(part_I):
    found = ask.forecast(part_I, plan.source)
    yield Plan(_score(found, weight), part_I, plan.source, found)
