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

import numpy as np

from mooncake_jax.conductor.question import Forecast
from mooncake_jax.conductor.question import Plans
from mooncake_jax.conductor.question import Question

MAX_SOURCES = 3


def cost_based(ask: Question) -> Plans:
  """The least predicted TTFT, with a price on compute."""
  sources, blocks = _sources(ask)
  extra_AI = np.array(blocks)[:, None] - ask.local_blocks_I
  np.maximum(extra_AI, 0, out=extra_AI)
  found = ask.forecast(extra_AI, sources)
  weight = _weight(ask, found)
  plans = Plans(extra_AI, sources, _score(found, weight), found)
  return _partial(ask, plans, found, weight)


def _weight(ask: Question, found: Forecast) -> float:
  """The price of compute: in full from a queue of one prompt everywhere on."""
  queue_s_I = ask.queue_s_I[ask.accepts_I]
  least_s = queue_s_I.item(queue_s_I.argmin()) if len(queue_s_I) else 0.0
  if not least_s:
    return 0.0
  return ask.work_weight * min(least_s / float(found.prefill_s.max()), 1.0)


def _score(found: Forecast, weight: float) -> np.ndarray:
  score_AI = found.ttft_s
  if weight:
    score_AI += weight * found.prefill_s
  return score_AI


def _sources(ask: Question) -> tuple[list[int], list[int]]:
  """Nobody, and the longest prefixes that can be had, best link first.

  Of each length the holder whose link is free first; lengths from the longest
  down, as a shorter one at an idle source may be there sooner.
  """
  sources, blocks, least_wait_s = [0], [0], np.inf
  local_I = ask.local_blocks_I
  least = local_I.item(local_I.argmin())
  for longest, holders in ask.holders:
    if longest <= least or not least_wait_s or len(sources) > MAX_SOURCES:
      break
    source, wait_s = ask.least_busy(holders)
    if wait_s < least_wait_s:
      sources.append(source)
      blocks.append(longest)
      least_wait_s = wait_s
  return sources, blocks


def _partial(
  ask: Question, plans: Plans, found: Forecast, weight: float
) -> Plans:
  """Fetches of as many blocks as are hidden besides, where those may win.

  No more than the source has: what is late may be the own prefix only.

  Such a plan takes at least the queue and the prefill on the whole prefix.
  """
  extra_AI, score_AI = plans.fetch_blocks_AI, plans.score_AI
  late_AI = (found.transfer_s > 0) & (extra_AI > 1)
  if not np.count_nonzero(late_AI):
    return plans
  bound_AI = np.where(late_AI, score_AI - found.transfer_s, np.inf)
  if bound_AI.min() >= score_AI.min():
    return plans
  first_s_AI, block_s_AI = ask.copy_line(plans.source_A)
  part_AI = (found.fetch_s - found.transfer_s - first_s_AI) / block_s_AI
  part_AI = np.clip(part_AI.astype(np.int64), 0, extra_AI)
  if not np.count_nonzero(part_AI):
    return plans
  part = ask.forecast(part_AI, plans.source_A)
  return Plans(
    np.concatenate((extra_AI, part_AI)),
    [*plans.source_A, *plans.source_A],
    np.concatenate((score_AI, _score(part, weight))),
    Forecast(*map(_both, found, part)),
  )


def _both(some: np.ndarray, more: np.ndarray) -> np.ndarray:
  """Alternatives one after another; [I] are those of all."""
  return some if some.ndim == 1 else np.concatenate((some, more))
