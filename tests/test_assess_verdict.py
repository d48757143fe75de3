# SPDX-License-Identifier: Apache-2.0
"""Break-even of recompute and fetch, and what verdict follows from figures."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mooncake_jax.assess.break_even import assumed_spread
from mooncake_jax.assess.break_even import break_even
from mooncake_jax.assess.break_even import formula_bytes_per_flop
from mooncake_jax.assess.break_even import spread_of
from mooncake_jax.assess.reuse import measure_reuse
from mooncake_jax.assess.supposed import needed_hit_rate
from mooncake_jax.assess.supposed import sharing
from mooncake_jax.assess.supposed import Supposed
from mooncake_jax.assess.verdict import PREDICTED
from mooncake_jax.assess.verdict import System
from mooncake_jax.assess.verdict import verdict
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.points import load_points
from mooncake_jax.workload.generate import conversation
from mooncake_jax.workload.generate import distinct_prompts
from mooncake_jax.workload.trace import TraceRow
from scripts.assessment.spec import Assessment
from scripts.config import load
from scripts.gin_source import find

SPEC, _ = load('configs/assess/a800.gin', (), Assessment)
COSTS = SPEC.experiment.costs
CONFIG = SPEC.experiment.model.read_config()
EVEN = break_even(CONFIG, COSTS, 2, 131_072, assumed_spread(0.1))
REUSED = measure_reuse(conversation(300), 512, 512)
ALONE = measure_reuse(distinct_prompts(1000, 20), 512, 512)


def system(family, *rates, hit_rate=0.0):
  cases = [PREDICTED, 'slower', 'faster'][: len(rates)]
  return System(
    f'{family} {rates[0]}', family, dict(zip(cases, rates)), 1.0, hit_rate, 1, 1
  )


def answer(coupled, apart, store, reuse=REUSED):
  systems = [
    system('coupled', *coupled),
    system('apart', *apart),
    system('store', *store, hit_rate=0.4),
  ]
  return verdict(systems, reuse, EVEN)


@pytest.mark.parametrize(
  'coupled,apart,store,reuse,wanted',
  [
    ((1, 1, 1), (2, 2, 2), (3, 3, 3), REUSED, 'adopt'),
    ((2, 2, 2), (1, 1, 1), (3, 3, 3), REUSED, 'store_only'),
    ((1, 1, 1), (2, 2, 2), (2, 2, 2), REUSED, 'apart_only'),
    ((1, 1, 1), (2, 2, 2), (2, 2, 2), ALONE, 'apart_only'),
    ((2, 2, 2), (1, 1, 1), (2, 2, 2), REUSED, 'no'),
    ((2, 2, 2), (1, 1, 1), (9, 9, 9), ALONE, 'no'),
    ((1, 1, 1), (2, 2, 2), (3, 2, 3), REUSED, 'open'),
    ((2, 2, 2), (3, 2, 3), (3, 2, 3), ALONE, 'no_store'),
    ((1, 1, 1), (2, 2, 2), (3, 3, 3), None, 'unknown'),
    ((0, 0, 0), (0, 0, 0), (0, 0, 0), REUSED, 'none'),
    ((0, 0, 0), (1, 1, 1), (2, 2, 2), REUSED, 'adopt'),
  ],
)
def test_goodputs_decide(coupled, apart, store, reuse, wanted):
  found = answer(coupled, apart, store, reuse)
  assert found.answer == wanted
  assert found.reasons and found.sentence
  if reuse is None:
    assert any(
      r.endswith('without reuse, would be a gain.') for r in found.reasons
    )


@given(*[st.lists(st.floats(0, 9), min_size=3, max_size=3) for _ in range(3)])
def test_a_store_that_is_worse_in_any_case_is_never_adopted(a, b, c):
  found = answer(a, b, c)
  if (
    min(
      found.gains['store over coupled'].low, found.gains['store over apart'].low
    )
    < 0
  ):
    assert found.answer not in ('adopt', 'store_only')


def test_hits_without_a_gain_are_named():
  found = answer((2, 2, 2), (2, 2, 2), (2, 2, 2))
  assert any(r.startswith('Hits without a gain') for r in found.reasons)
  found = answer((1, 1, 1), (1, 1, 1), (2, 2, 2))
  assert not any(r.startswith('Hits without a gain') for r in found.reasons)


def test_a_gain_over_nothing_has_no_size():
  reasons = answer((0, 0, 0), (1, 1, 1), (2, 2, 2)).reasons
  told = [each for each in reasons if each.startswith('Goodput, ')]
  assert told[0] == 'Goodput, apart over coupled: some where there was none.'
  assert not any('inf' in each for each in told)


def supposed(share, store, coupled=1.0, apart=1.0):
  return Supposed(share, share / 2, store, coupled, apart)


@pytest.mark.parametrize(
  'stores,needed',
  [
    ((1.0, 1.0, 1.0), None),
    ((1.2, 1.3, 1.4), 0.1),
    ((1.0, 1.2, 1.4), 0.15),
    ((1.0, 1.05, 1.15), 0.25),
    ((float('inf'),) * 3, 0.1),
  ],
)
def test_the_hit_rate_that_would_be_needed(stores, needed):
  tried = [supposed(*each) for each in zip((0.2, 0.4, 0.6), stores)]
  found = needed_hit_rate(tried, 0.1)
  assert found == (needed if needed is None else pytest.approx(needed))
  systems = [system(f, 1, 1, 1) for f in ('coupled', 'apart', 'store')]
  reasons = verdict(systems, None, EVEN, supposed=tried).reasons
  assert any(
    r.startswith('A store would ' + ('be no' if needed is None else 'pay'))
    for r in reasons
  )


def test_who_shows_no_limit_is_not_judged():
  tried = [supposed(0.4, 2.0, 2.0, 2.0)]
  systems = [system(f, 2, 2, 2) for f in ('coupled', 'apart', 'store')]
  found = verdict(systems, REUSED, EVEN, most_rate=1.9)
  assert found.answer == 'open'
  assert verdict(systems, ALONE, EVEN, most_rate=1.9).answer == 'no_store'
  found = verdict(systems, None, EVEN, supposed=tried, most_rate=1.9)
  assert any('is not known either' in r for r in found.reasons)
  assert any('all keep the limits up to 1.9' in r for r in found.reasons)


def test_others_that_serve_nothing_need_no_hit_rate():
  assert supposed(0.2, 0.0, 0.0, 0.0).gain == 0
  assert needed_hit_rate([supposed(0.2, 1.0, 0.0, 0.0)], 0.1) == 0.1


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.floats(0, 1))
def test_supposed_prompts_share_what_they_should(lengths, share):
  rows = [TraceRow(float(i), n, 1, (), False) for i, n in enumerate(lengths)]
  found = sharing(rows, share, 16)
  seen = set()
  for row, made in zip(rows, found):
    assert len(made.hash_ids) == -(-row.input_tokens // 16)
    old = [each in seen for each in made.hash_ids]
    wanted = min(round(share * row.input_tokens / 16), row.input_tokens // 16)
    assert sum(old) in (0, wanted) and old == sorted(old, reverse=True)
    seen |= {*made.hash_ids}


def test_refusing_does_not_decide_but_is_told():
  systems = [
    system('coupled', 1, 1, 1),
    system('apart', 2, 2, 2),
    system('store', 2, 2, 2, hit_rate=0.4),
    replace(system('store', 9, hit_rate=0.4), name='strict', refuses=True),
  ]
  found = verdict(systems, REUSED, EVEN)
  assert found.answer == 'apart_only'
  assert any(r.startswith('strict would serve +350%') for r in found.reasons)


def test_the_formula_is_the_papers():
  # FAST'25 section 2.3's b of 22; here it is counted: 25.5 (gate, up, down).
  d, p = 8192, 1024
  papers = 2 * d * 2 / (8 * (4 * p * d + 22 * d * d))
  assert formula_bytes_per_flop(CONFIG, p, 2) == pytest.approx(papers, rel=0.2)


def test_break_even_is_where_the_lines_cross():
  for medium, tokens in EVEN.tokens.items():
    for row in EVEN.rows:
      wins = row.fetch_s[medium][0] < row.recompute_s[0]
      assert wins == (tokens is not None and row.prefix_tokens >= tokens)
  for medium, sure in EVEN.sure_tokens.items():
    tokens = EVEN.tokens[medium]
    assert sure is None or (tokens is not None and sure >= tokens)
  assert isinstance(COSTS, PolynomialCost)
  slow = replace(COSTS, ssd_read_bytes_per_s=1e3)
  never = break_even(CONFIG, slow, 2, 131_072, assumed_spread(0.1))
  assert never.tokens['SSD'] is None and never.tokens['HBM'] == 256


def test_p99_comes_from_measured_points():
  (points,) = load_points(find(str(SPEC.points))).values()
  spread = spread_of(COSTS, points)
  assert 1.0 <= spread.prefill < 1.3 and spread.points >= len(points.prefill)
