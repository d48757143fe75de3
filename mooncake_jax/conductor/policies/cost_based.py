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
MAX_PARTIAL = 4


def cost_based(ask: Question) -> Plans:
  """The least predicted TTFT, with a price on compute."""
  source_S, blocks_S = _sources(ask)
  extra_SI = np.maximum(blocks_S[:, None] - ask.local_blocks_I, 0)
  found = ask.forecast(extra_SI, source_S[:, None])
  weight = _weight(ask, found)
  score_SI = _score(found, weight)
  best = score_SI.argmin(axis=0), np.arange(score_SI.shape[1])
  plans = Plans(
    extra_SI[best],
    source_S[best[0]],
    score_SI[best],
    found.choose(best),
  )
  return _partial(ask, plans, extra_SI, source_S, found, weight)


def _weight(ask: Question, found: Forecast) -> float:
  """The price of compute: in full from a queue of one prompt everywhere on."""
  least_s = float(ask.queue_s_I.min(where=ask.accepts_I, initial=np.inf))
  return ask.work_weight * min(least_s / float(found.prefill_s.max()), 1.0)


def _score(found: Forecast, weight: float) -> np.ndarray:
  return found.ttft_s + weight * found.prefill_s


def _sources(ask: Question) -> tuple[np.ndarray, np.ndarray]:
  """Nobody, and the longest prefixes that can be had, best link first.

  Of each length the holder whose link is free first; lengths from the longest
  down, as a shorter one at an idle source may be there sooner.
  """
  stored_I, wait_s_I = ask.stored_blocks_I, ask.link_wait_s_I['copy']
  sources, blocks = [0], [0]
  longest, least_wait_s = int(stored_I.max(initial=0)), np.inf
  least = int(ask.local_blocks_I.min(initial=0))
  while longest > least and least_wait_s > 0 and len(sources) <= MAX_SOURCES:
    holders = (stored_I == longest).nonzero()[0]
    source = int(holders[wait_s_I[holders].argmin()])
    if wait_s_I[source] < least_wait_s:
      sources.append(source)
      blocks.append(longest)
      least_wait_s = wait_s_I[source]
    longest = int((stored_I * (stored_I < longest)).max())
  return np.array(sources), np.array(blocks)


def _partial(
  ask: Question,
  plans: Plans,
  extra_SI: np.ndarray,
  source_S: np.ndarray,
  found: Forecast,
  weight: float,
) -> Plans:
  """Fetches of as many blocks as the queue hides, where those are better.

  Such a plan takes at least the queue and the prefill on the whole prefix; the
  few instances where that is least are tried.
  """
  late_SI = (found.transfer_s > 0) & (extra_SI > 1)
  if not late_SI.any():
    return plans
  score_SI = _score(found, weight)
  bound_SI = np.where(late_SI, score_SI - found.transfer_s, np.inf)
  hopeful = np.flatnonzero(bound_SI.ravel() < plans.score_I.min())
  order = bound_SI.ravel()[hopeful].argsort()[:MAX_PARTIAL]
  for flat in hopeful[order].tolist():
    s, i = divmod(flat, len(plans.score_I))
    hidden_s = float(found.fetch_s[s, i] - found.transfer_s[s, i])
    most = int(extra_SI[s, i]) - 1
    plans = _better(ask, plans, int(source_S[s]), i, hidden_s, most, weight)
  return plans


def _better(
  ask: Question,
  plans: Plans,
  source: int,
  i: int,
  hidden_s: float,
  most: int,
  weight: float,
) -> Plans:
  """The plans, with what `hidden_s` hides for instance i if that is better."""
  first_s, block_s = ask.copy_line(np.array([source]))
  part = int((hidden_s - first_s[i]) / block_s[i])
  if not 1 <= part <= most:  # where its own prefix is late, all would come
    return plans
  fetch_I, source_I = plans.fetch_blocks_I.copy(), plans.source_I.copy()
  fetch_I[i], source_I[i] = part, source
  found = ask.forecast(fetch_I, source_I)
  score = _score(found, weight)[i]
  if score >= plans.score_I[i]:
    return plans
  score_I = plans.score_I.copy()
  score_I[i] = score
  return Plans(fetch_I, source_I, score_I, found)
