# SPDX-License-Identifier: Apache-2.0
"""Who will decode beside a request, and what admission makes of it."""

from dataclasses import replace
from typing import get_args

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.cluster_spec import Reserve
from mooncake_jax.conductor.admission import ADMISSIONS
from mooncake_jax.conductor.admission import Outlook
from mooncake_jax.conductor.admission import slo_predictive
from mooncake_jax.conductor.corrections import Odds
from mooncake_jax.conductor.decode_choice import tail
from mooncake_jax.conductor.decode_rows import DecodeRows
from mooncake_jax.conductor.policies import cost_based
from mooncake_jax.events import Preempted
from mooncake_jax.events import TokensEmitted
from mooncake_jax.metrics.latency import tail_s
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import TokenSegment
from mooncake_jax.slo import SLO

NEVER = 1e12

row = st.tuples(
  st.floats(0, 10),  # first token
  st.integers(1, 50),  # prompt
  st.integers(1, 40),  # output
  st.booleans(),  # it goes away again
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row, max_size=40), st.floats(0, 10), st.floats(0, 20))
def test_rows_are_those_of_a_naive_count(rows, now_s, later_s):
  """Each begins at its first token, or now, and emits one a step."""
  counted, step_s, time_s = DecodeRows(), 0.25, now_s + later_s
  kept = [
    (counted.add(first_s, prompt, output, 1.0), first_s, prompt, output, goes)
    for first_s, prompt, output, goes in rows
  ]
  for r, *_, goes in kept:
    if goes:
      counted.remove(r)
  batch = counted.at(time_s, now_s, step_s, NEVER)
  num_rows, tokens = 0, 0.0
  for _, first_s, prompt, output, goes in kept:
    emitted = (time_s - max(first_s, now_s)) / step_s
    if not goes and 0 <= emitted < output:
      num_rows, tokens = num_rows + 1, tokens + prompt + emitted
  assert batch.rows == pytest.approx(num_rows)
  assert batch.context_tokens == pytest.approx(tokens)


def test_outputs_that_stop_by_themselves_thin_a_batch_out():
  rows = DecodeRows()
  for _ in range(4):
    rows.add(0.0, 10, 1000, 1.0)
  assert rows.at(5.0, 0.0, 0.1, 50.0).rows == pytest.approx(4 / np.e)


@pytest.mark.parametrize('count', [2, 3, 11, 12, 21, 200])
def test_a_tail_is_the_slo_s_measure_of_equal_steps(count):
  """A first interval of one and a half steps, then steps."""
  segments = [TokenSegment(0.0, 0.0, 1), TokenSegment(1.5, 1.0, count - 1)]
  assert tail(count) == pytest.approx(tail_s(segments))
  assert tail(count, others=0) == 1.0


def test_odds_learn_a_lasting_error_and_how_far_it_wavers():
  odds, rng = Odds(True), np.random.default_rng(0)
  for _ in range(3000):
    odds.observe(0.02, 0.025 * np.exp(0.2 * rng.normal()))
  assert odds.factor == pytest.approx(1.25, rel=0.1)
  assert odds.spread == pytest.approx(0.2, rel=0.1)
  assert Odds(False).factor == 1.0


def test_odds_of_keeping_a_limit_are_those_of_what_was_observed():
  odds, rng = Odds(True), np.random.default_rng(1)
  taken_s = 0.02 * np.exp(rng.logistic(0, 0.05, 4000))
  for observed_s in taken_s:
    odds.observe(0.02, observed_s)
  for limit_s in (0.017, 0.02, 0.021, 0.023):
    share = float(np.mean(taken_s <= limit_s))
    assert odds.keeps(limit_s, 0.02 * odds.factor) == pytest.approx(
      share, abs=0.05
    )


def test_on_arrival_only_what_would_miss_as_good_as_surely_is_refused():
  slo = SLO(1.0, 0.1)
  for ttft_s, keeps, share, reason in (
    (0.9, 0.9, 1.0, ''),
    (1.1, 0.9, 1.0, 'ttft'),
    (0.9, 0.9, 0.5, 'ttft'),
    (0.9, 0.02, 1.0, ''),
    (0.9, 0.005, 1.0, 'tbt'),
  ):
    seen = Outlook(ttft_s, 0.1, 0.1, 0.1, keeps=keeps, share=share)
    assert slo_predictive(seen, slo) == reason


def test_a_long_context_may_not_join_where_a_short_one_may():
  """It would keep its own limit, but six others would miss theirs."""
  spec = replace(SPEC, decode_instances=1, decode_pool_tokens=8192)
  slo = SLO(30.0, 1.6 * COSTS.decode_step_s(7, 600))
  joins = {}
  for length in (20, 2500):
    conductor = make_conductor(
      replace(spec, max_batch=16), slo, admission='slo_predictive'
    )
    for i in range(6):
      request = make_request(f'f{i}', np.full(90, 2 + i), 200)
      placed = conductor.place(request, 0.0)
      assert isinstance(placed, Placement)
      first = Emitted(((f'f{i}', 0),), TokenSegment(0.0, 0.0, 1))
      conductor.observe(TokensEmitted(0.0, placed.decode, first))
    asked = make_request('r', np.full(length, 9), 200)
    assert isinstance(conductor.place(asked, 0.01), Placement)
    joins[length] = conductor.keeps_tbt(asked, 'decode0', 7, 546 + length)
  assert joins == {20: True, 2500: False}


def test_who_has_nearly_ended_keeps_nobody_out():
  """What others have behind them can't be spoilt any more."""
  slo = SLO(30.0, COSTS.decode_step_s(3, 3000))
  spec = replace(SPEC, decode_instances=1, decode_pool_tokens=8192)
  joins = {}
  for count in (1, 199):
    conductor = make_conductor(spec, slo, admission='slo_predictive')
    for i in range(2):
      request = make_request(f'f{i}', np.full(90, 2 + i), 200)
      placed = conductor.place(request, 0.0)
      assert isinstance(placed, Placement)
      tokens = Emitted(((f'f{i}', 0),), TokenSegment(0.0, 0.002, count))
      conductor.observe(TokensEmitted(0.4, placed.decode, tokens))
    asked = make_request('r', np.full(2600, 9), 200)
    assert isinstance(conductor.place(asked, 0.5), Placement)
    joins[count] = conductor.keeps_tbt(asked, 'decode0', 3, 3000)
  assert joins == {1: False, 199: True}


def test_room_goes_by_the_rule_of_the_cluster():
  """Four prompts of 40 and outputs of 60 tokens want 400; there are 256."""
  spec = replace(SPEC, decode_instances=1, decode_pool_tokens=256)
  room = {}
  for reserve in get_args(Reserve):
    conductor = make_conductor(
      replace(spec, decode_reserve=reserve), admission='none'
    )
    placed = []
    for i in range(4):
      request = make_request(f'r{i}', np.full(40, 2 + i), 60)
      placed.append(conductor.place(request, 0.0))
    assert all(isinstance(p, Placement) for p in placed)
    loads = conductor.view.decode
    room[reserve] = loads.reserved_tokens_I.item(0), loads.waiting_tokens(0)
    for _ in range(5):  # eight steps at a time, until all is taken
      for p in placed:
        segment = TokenSegment(0.1, 0.001, 8)
        emitted = Emitted(((p.request_id, 0),), segment)
        conductor.observe(TokensEmitted(0.1, 'decode0', emitted))
      conductor.view.check()
    assert loads.reserved_tokens_I.item(0) <= 256
    if reserve == 'prompt':
      assert loads.reserved_tokens_I.item(0) == 256
      conductor.observe(Preempted(0.2, 'r3', 0, 'decode0'))
      conductor.view.check()
      assert loads.waiting_tokens(0) > 0
  assert room == {'all': (200, 200), 'prompt': (176, 0)}


@pytest.mark.parametrize('name', list(ADMISSIONS))
def test_an_admission_given_as_a_function_decides_as_by_its_name(name):
  slo = SLO(0.12, 1.03 * COSTS.decode_step_s(2, 150))
  said = {}
  for rule in (name, ADMISSIONS[name]):
    conductor = make_conductor(slo=slo, admission=rule, policy=cost_based)
    said[rule] = []
    for i in range(24):
      request = make_request(f'r{i}', np.full(40 + i, 2 + i), 30)
      placed = conductor.place(request, 0.001 * i)
      said[rule].append(getattr(placed, 'reason', ''))
      if isinstance(placed, Placement):
        first = Emitted(((f'r{i}', 0),), TokenSegment(0.0, 0.0, 1))
        conductor.observe(TokensEmitted(0.001 * i, placed.decode, first))
  assert said[name] == said[ADMISSIONS[name]]
  assert any(said[name]) == (name != 'none')
