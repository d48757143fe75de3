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

Greedy TTFT ignores that a request's compute delays those after it. A plan's
score therefore adds `work_weight` seconds a second of prefill: of two plans
that are about as fast the one that computes less wins, which keeps requests
where their prefix is while that costs little, and queues shorter for all.
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
  score_SI = _score(ask, found)
  best_I = score_SI.argmin(axis=0)
  rows_I = np.arange(len(best_I))
  plans = Plans(
    extra_SI[best_I, rows_I], source_S[best_I], score_SI[best_I, rows_I]
  )
  return _partial(ask, plans, extra_SI, source_S, found)


def _score(ask: Question, found: Forecast) -> np.ndarray:
  return found.ttft_s + ask.work_weight * found.prefill_s


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
) -> Plans:
  """Fetches of as many blocks as the queue hides, where those are better.

  Such a plan takes at least the queue and the prefill on the whole prefix; the
  few instances where that is least are tried.
  """
  late_SI = (found.transfer_s > 0) & (extra_SI > 1)
  if not late_SI.any():
    return plans
  bound_SI = np.where(late_SI, _score(ask, found) - found.transfer_s, np.inf)
  hopeful = np.flatnonzero(bound_SI.ravel() < plans.score_I.min())
  order = bound_SI.ravel()[hopeful].argsort()[:MAX_PARTIAL]
  for flat in hopeful[order].tolist():
    s, i = divmod(flat, len(plans.score_I))
    _try_part(ask, plans, int(source_S[s]), i, int(extra_SI[s, i]), found, s)
  return plans


def _try_part(
  ask: Question,
  plans: Plans,
  source: int,
  i: int,
  extra: int,
  found: Forecast,
  s: int,
) -> None:
  """Writes the plan of a part for instance i if that is the better one."""
  first_s, block_s = ask.copy_line(np.array([source]))
  hidden_s = found.fetch_s[s, i] - found.transfer_s[s, i]
  part = int((hidden_s - first_s[i]) / block_s[i])
  if not 0 < part < extra:
    return
  fetch_I = plans.fetch_blocks_I.copy()
  fetch_I[i] = part
  sources_I = plans.source_I.copy()
  sources_I[i] = source
  score = _score(ask, ask.forecast(fetch_I, sources_I))[i]
  if score < plans.score_I[i]:
    plans.fetch_blocks_I[i] = part
    plans.source_I[i] = source
    plans.score_I[i] = score
