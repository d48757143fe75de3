# SPDX-License-Identifier: Apache-2.0
"""Policies on hand-made cases: Algorithm 1 as a table, and its rivals."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lifecycle import COSTS
from mooncake_jax.conductor.arrays import pick
from mooncake_jax.conductor.fleet import Fleet
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.question import best_plan
from mooncake_jax.conductor.question import least_score
from mooncake_jax.conductor.question import Question
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.conductor.work_costs import WorkCosts
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS

BLOCK_TOKENS = 512
BLOCK_BYTES = BLOCK_TOKENS * 1000
TOKENS = 10_000
WORK = WorkCosts(
  InstanceBelief(COSTS, 1024, 1 << 20, 8), BLOCK_BYTES, BLOCK_TOKENS
)


# A block takes longer to copy (0.26 s) than to compute.
SLOW_LINK = WorkCosts(
  InstanceBelief(replace(COSTS, copy_bytes_per_s=2e6), 1024, 1 << 20, 8),
  BLOCK_BYTES,
  BLOCK_TOKENS,
)


def ask(
  *instances, remote_blocks=0, waits_s=None, work=WORK, **kwargs
) -> Question:
  """Instances of (local blocks, stored blocks, queue_s)."""
  local, stored, queue_s = (np.array(column) for column in zip(*instances))
  lengths = sorted({*stored[stored > 0].tolist()}, reverse=True)
  holders = [(n, np.flatnonzero(stored == n)) for n in lengths]
  idle = np.zeros(len(local))
  waits: dict[Link, np.ndarray] = {link: idle for link in LINKS}
  waits |= {link: np.array(w) for link, w in (waits_s or {}).items()}
  one = np.ones(len(local))
  return Question(
    TOKENS,
    BLOCK_TOKENS,
    Fleet([f'p{i}' for i in range(len(local))], [work] * len(local)),
    local,
    holders,
    np.zeros_like(local),
    np.zeros_like(local),
    False,
    queue_s.astype(float),
    waits,
    one,
    one,
    one.astype(bool),
    remote_blocks,
    **kwargs,
  )


def decide(policy, question, number=0):
  """(instance, blocks to fetch, source or None) of the best plan."""
  plans = POLICIES[policy](question)
  i = pick(least_score(plans), question.able_I, number)
  plan = best_plan(plans, i)
  fetch = plan.fetch_blocks(i)
  return i, fetch, plan.source if fetch else None


# Instances of (local, stored, queue_s); threshold; the answer.
ALGORITHM_1 = {
  'nothing cached': ([(0, 0, 1.0), (0, 0, 0.0)], 2.0, (1, 0, None)),
  'equal prefixes': ([(9, 9, 1.0), (9, 9, 0.5)], 1.0, (1, 0, None)),
  'no local prefix': ([(10, 10, 9.0), (0, 0, 0.0)], 2.0, (1, 10, 0)),
  'far longer': ([(10, 10, 9.0), (4, 4, 0.0)], 2.0, (1, 6, 0)),
  'at the threshold': ([(10, 10, 9.0), (5, 5, 0.0)], 2.0, (1, 0, None)),
  'above threshold 1': ([(10, 10, 9.0), (9, 9, 0.0)], 1.0, (1, 1, 0)),
  'the holder itself': ([(10, 10, 0.0), (0, 0, 0.0)], 2.0, (0, 0, None)),
  'expected, not stored': ([(10, 0, 9.0), (0, 0, 0.0)], 2.0, (1, 0, None)),
  'expected beside stored': ([(10, 3, 9.0), (0, 0, 0.0)], 2.0, (1, 3, 0)),
  'longer queue, less work': ([(15, 15, 0.1), (1, 1, 0.0)], 99.0, (0, 0, None)),
}


@pytest.mark.parametrize('case', ALGORITHM_1)
def test_algorithm_1(case):
  instances, threshold, answer = ALGORITHM_1[case]
  question = ask(*instances, balancing_threshold=threshold)
  assert decide('kvcache_centric', question) == answer


def test_algorithm_1_always_transfers_above_the_threshold():
  """Even where recomputing would be faster: as printed."""
  question = ask((10, 10, 9.0), (0, 0, 0.0), waits_s={'copy': [50.0, 0.0]})
  assert decide('kvcache_centric', question) == (1, 10, 0)
  assert decide('cost_based', question) == (1, 0, None)


def test_algorithm_1_adds_up_its_printed_terms():
  plans = POLICIES['kvcache_centric'](ask((4, 4, 5.0), (0, 0, 0.0)))
  copy_s = COSTS.transfer_s(4 * BLOCK_BYTES, 'copy')
  prompt_s = COSTS.prompt_s(TOKENS, 4 * BLOCK_TOKENS, 1024)
  assert plans[0].score_I[1] == pytest.approx(copy_s + prompt_s)


def test_random_goes_everywhere_and_draws_decide():
  question = ask((0, 0, 0.0), (0, 0, 9.0), (3, 3, 1.0))
  seen = Counter(decide('random', question, n)[0] for n in range(30))
  assert seen == {0: 10, 1: 10, 2: 10}


def test_load_balancing_takes_the_shortest_queue():
  assert decide('load_balancing', ask((10, 10, 3.0), (0, 0, 2.0)))[0] == 1


def test_cache_aware_weighs_its_own_prefix_against_the_queue():
  assert decide('cache_aware', ask((10, 10, 0.1), (0, 0, 0.0)))[0] == 0
  assert decide('cache_aware', ask((10, 10, 99.0), (0, 0, 0.0))) == (1, 0, None)


def test_cost_based_fetches_what_pays_and_no_more():
  """Whatever the queue, no other number of blocks is faster."""
  for work in (WORK, SLOW_LINK):
    for queue_s, wait_s in product((0.0, 0.005, 0.8), (0.0, 0.01, 0.2, 5.0)):
      question = ask(
        (18, 18, 50.0),
        (2, 2, queue_s),
        waits_s={'copy': [wait_s, 0.0]},
        work=work,
      )
      plans = POLICIES['cost_based'](question)
      by_hand = [
        question.forecast(np.array([0, n])).ttft_s[1] for n in range(17)
      ]
      assert least_score(plans)[1] <= min(by_hand) + 1e-9


def test_cost_based_fetches_a_part_where_the_queue_hides_only_that():
  question = ask((18, 18, 50.0), (0, 0, 0.8), work=SLOW_LINK)
  assert decide('cost_based', question) == (1, 3, 0)
  found = question.forecast(np.array([0, 3])).at(1)
  assert found.transfer_s == 0.0


def test_cost_based_takes_the_source_whose_link_is_free():
  question = ask(
    (10, 10, 9.0),
    (10, 10, 9.0),
    (0, 0, 0.0),
    waits_s={'copy': [3.0, 0.0, 0.0]},
  )
  assert decide('cost_based', question) == (2, 10, 1)


def test_cost_based_prefers_a_shorter_prefix_at_an_idle_source():
  question = ask(
    (12, 12, 9.0),
    (11, 11, 9.0),
    (0, 0, 0.0),
    waits_s={'copy': [3.0, 0.0, 0.0]},
  )
  assert decide('cost_based', question) == (2, 11, 1)


@pytest.mark.parametrize('policy', ['kvcache_centric', 'cost_based'])
def test_what_only_the_remote_store_has_is_read_by_whoever_prefills(policy):
  """So a peer's shorter prefix is worth less, and an idle instance wins."""
  question = ask((9, 9, 1.0), (0, 0, 0.0), remote_blocks=8)
  i, fetch, _ = decide(policy, question)
  assert i == 1
  found = question.forecast(np.array([0, fetch])).at(1)
  prefix = max(fetch, 8) * BLOCK_TOKENS
  assert found.prefill_s == COSTS.prompt_s(TOKENS, prefix, 1024)
  assert found.fetch_s > 0


def test_a_dear_second_of_compute_keeps_a_request_at_its_prefix():
  waits_s = {'copy': [99.0, 0.0]}
  saved_s = COSTS.prompt_s(TOKENS, 0, 1024) - COSTS.prompt_s(
    TOKENS, 10 * BLOCK_TOKENS, 1024
  )
  queue_s = saved_s + 0.1
  near = ((10, 10, queue_s + 9.0), (0, 0, 9.0))
  cheap = ask(*near, waits_s=waits_s, work_weight=0.0)
  dear = ask(*near, waits_s=waits_s, work_weight=1.0)
  assert decide('cost_based', cheap)[0] == 1
  assert decide('cost_based', dear)[0] == 0
  idle = ask((10, 10, queue_s), (0, 0, 0.0), waits_s=waits_s, work_weight=1.0)
  assert decide('cost_based', idle)[0] == 1


def test_streaming_hides_a_transfer_behind_the_first_chunk():
  plain = ask((18, 18, 50.0), (0, 0, 0.0))
  streamed = ask((18, 18, 50.0), (0, 0, 0.0), overlap=0.75)
  fetch = np.array([0, 18])
  before, after = (q.forecast(fetch).at(1) for q in (plain, streamed))
  assert before.transfer_s == before.fetch_s > 0
  # Only the first of four parts must be there before anything computes.
  assert after.transfer_s == pytest.approx(before.fetch_s / 4)
  assert before.prefill_s == after.prefill_s


def test_of_equal_scores_each_is_drawn_alike():
  score, able = np.array([1.0, 0.5, 0.5, 0.5]), np.array([True] * 3 + [False])
  assert Counter(pick(score, able, n) for n in range(10)) == {1: 5, 2: 5}


def test_instances_that_differ_have_their_own_costs():
  slow = WorkCosts(
    InstanceBelief(COSTS, 128, 1 << 20, 8, stage_layers=(2, 1)),
    BLOCK_BYTES,
    BLOCK_TOKENS,
  )
  fleet = Fleet(['a', 'b', 'c'], [WORK, slow, WORK])
  for prefix in ((0, 0, 4), (4, 8, 0)):
    found, first = fleet.prompt_s(3000, np.array(prefix), 128)
    for i, (seconds, blocks) in enumerate(zip(found, prefix)):
      assert seconds == fleet.work_I[i].prompt_s(3000, blocks * 128)
    new_tokens = 3000 - prefix[0] * 128
    assert first[0] == pytest.approx(found[0] * 1024 / new_tokens)
  assert slow.busy_s(3000, 0, 1.0) == pytest.approx(
    COSTS.prompt_s(3000, 0, 128) * 2 / 3
  )


def test_a_part_is_no_more_than_the_source_has():
  """What is late is the instance's own prefix, not the fetch."""
  waits_s = {'onload': [9.0, 0.0], 'copy': [1.0, 0.0]}
  question = ask((12, 11, 5.0), (14, 14, 30.0), waits_s=waits_s)
  assert decide('cost_based', question)[1] <= 2
