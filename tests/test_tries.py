# SPDX-License-Identifier: Apache-2.0
"""What tries cost and reuse, also those that failed or were cut short."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LOOSE
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import SPEC
from mooncake_jax.changes import Change
from mooncake_jax.changes import Changes
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.metrics.records import RecordBook
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import Placement
from mooncake_jax.serve import serve

LONE = make_request('a', np.arange(96) % 50 + 2, output=30)
# In the middle of the third of eight chunks of 12 tokens.
MIDDLE_S = 2.5 * COSTS.prefill_s(12, 12)
ALL_S = COSTS.prompt_s(96, 0, 12)


def served(change, requests=(LONE,), **kwargs):
  spec = replace(SPEC, prefill_instances=2, decode_instances=2, **kwargs)
  cluster = make_virtual(spec)
  conductor = make_conductor(spec, admission='none')
  return serve(requests, conductor, cluster, changes=Changes((change,)))[0]


def test_what_a_try_finds_of_its_own_is_no_hit():
  record, *_ = served(Change(2 * ALL_S, 'lose', 'decode0'))
  assert (record.outcome, record.attempt) == ('completed', 1)
  assert record.reused_tokens == {}
  assert record.recomputed_tokens == 8  # the last block is always computed
  assert record.prefill_s == pytest.approx(ALL_S + COSTS.prefill_s(8, 88))
  summary = summarize([record], LOOSE)
  assert summary.hit_rate == summary.wasted_prefill_s == 0.0


def test_who_starts_anew_in_the_middle_computes_no_more_than_is_told():
  record, *_ = served(Change(MIDDLE_S, 'lose', 'prefill1'))
  assert (record.attempt, record.reused_tokens) == (1, {})
  assert record.recomputed_tokens == 24
  ran_s = COSTS.prefill_s(12, 0) + COSTS.prefill_s(12, 12)
  assert record.prefill_s == pytest.approx(ALL_S + ran_s)


def test_who_ends_in_the_middle_wasted_the_chunks_that_ran():
  ran_s = COSTS.prefill_s(12, 0) + COSTS.prefill_s(12, 12)
  gone = served(Change(MIDDLE_S, 'cancel', 'a'))
  late = served(Change(9.0, 'wipe', 'x'), request_timeout_s=MIDDLE_S)
  assert (gone[0].outcome, late[0].outcome) == ('cancelled', 'failed')
  for records in (gone, late):
    summary = summarize(records, LOOSE)
    assert summary.wasted_prefill_s == pytest.approx(ran_s)
    assert summary.hit_rate is None


def test_another_try_reuses_what_others_had_computed_meanwhile():
  """40 of 96 tokens computed, then 64 found: 24 are a hit, none are lost."""
  book = RecordBook()
  placement = Placement('a', 0, 'p', 'd')
  book.decided(LONE, placement, 0.0)
  book.observe(PrefixFetched(1.0, 'a', 0, 'p', 0.0))
  book.retried(Failed(2.0, 'a', 0, 'p', 'lost', True, computed_tokens=40))
  book.decided(LONE, replace(placement, attempt=1), 2.0)
  book.observe(
    PrefixFetched(3.0, 'a', 1, 'q', 2.0, local_tokens=48, remote_tokens=16)
  )
  book.observe(PrefillDone(4.0, 'a', 1, 'q', 3.0, 32, 1.0))
  assert book['a'].reused_tokens == {'local_host': 8, 'remote_host': 16}
  assert book['a'].recomputed_tokens == 0


def test_who_ends_with_the_prefill_that_resumes_it_was_away_until_then():
  book = RecordBook()
  book.decided(LONE, Placement('a', 0, 'p', 'd'), 0.0)
  book.observe(PrefillDone(1.0, 'a', 0, 'p', 0.0, 96, 1.0))
  book.observe(Preempted(2.0, 'a', 0, 'd'))
  book.observe(PrefillDone(5.0, 'a', 0, 'p', 3.0, 100, 1.0))
  book.observe(Finished(5.0, 'a', 0, 'd', 30))
  record = book['a']
  assert (record.preempted_s, record.recomputed_tokens) == (3.0, 100)
