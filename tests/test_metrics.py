# SPDX-License-Identifier: Apache-2.0
"""TBT against its definition, counts that add up, goodput of known curves."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from mooncake_jax.metrics import latency
from mooncake_jax.metrics.goodput import goodput
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import comparison
from mooncake_jax.metrics.table import flat
from mooncake_jax.metrics.table import table
from mooncake_jax.request import Outcome
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.slo import SLO


def record(name='r', outcome: Outcome = 'completed', **fields) -> RequestRecord:
  return RequestRecord(name, 100, 0.0, outcome=outcome, **fields)


def served(
  name='r', ttft_s=1.0, tbt_s=0.05, tokens=11, **fields
) -> RequestRecord:
  """Completed, evenly spaced."""
  segments = [TokenSegment(ttft_s, tbt_s, tokens)]
  return record(
    name,
    placed_s=0.0,
    prefill_done_s=ttft_s,
    prefill_s=0.5,
    first_token_s=ttft_s,
    finished_s=segments[0].last_s,
    segments=segments,
    **fields,
  )


@st.composite
def segment_lists(draw) -> list[TokenSegment]:
  seconds = st.floats(1e-4, 10)
  now_s, segments = 0.0, []
  for _ in range(draw(st.integers(0, 6))):
    now_s += draw(seconds)
    count = draw(st.sampled_from([1, 1, 2, 3, 10, 57]))
    growth_s = draw(st.sampled_from([0.0, 1e-4, 0.3]))
    segments.append(TokenSegment(now_s, draw(seconds), count, growth_s))
    now_s = segments[-1].last_s
  return segments


def expanded(segments: list[TokenSegment]) -> np.ndarray:
  """Intervals of the tokens written out, the slow way."""
  times = [
    segment.token_s(i) for segment in segments for i in range(segment.count)
  ]
  return np.diff(times)


@given(segment_lists(), st.floats(0, 100))
def test_intervals_of_segments_are_those_of_their_tokens(segments, percent):
  gaps = expanded(segments)
  r = record(segments=segments)
  if not len(gaps):
    assert latency.tbt_tail_s(r) is latency.tpot_s(r) is None
    assert latency.tbt_percentile(r, percent) is None
    assert latency.longest_gap_s(r) is None
    return
  longest = np.sort(gaps)[-math.ceil(len(gaps) / 10) :]
  assert latency.tbt_tail_s(r) == pytest.approx(longest.mean())
  assert latency.tpot_s(r) == pytest.approx(gaps.mean())
  assert latency.longest_gap_s(r) == pytest.approx(gaps.max())
  assert latency.tbt_percentile(r, percent) == pytest.approx(
    np.percentile(gaps, percent), abs=1e-9
  )


def test_the_tail_is_a_tenth_rounded_up():
  # 70 intervals: the longest 7 (0.1 * 70 is 7.000000000000001 in floats).
  slow, fast = TokenSegment(0, 1.0, 8), TokenSegment(7.1, 0.1, 63)
  assert latency.tbt_tail_s(record(segments=[slow, fast])) == 1.0
  one = record(segments=[TokenSegment(0, 0.3, 2)])
  assert latency.tbt_tail_s(one) == 0.3


def test_a_stall_shows_in_the_tail_and_not_in_the_mean():
  stalled = record(
    segments=[TokenSegment(0, 0.01, 100), TokenSegment(10.99, 0.01, 100)]
  )
  assert latency.tpot_s(stalled) == pytest.approx(0.06, rel=0.01)
  assert latency.tbt_tail_s(stalled) == pytest.approx(10.19 / 20)


def test_a_long_segment_costs_no_more_than_a_short_one():
  long = record(segments=[TokenSegment(0, 1e-3, 10**15)])
  assert latency.tbt_tail_s(long) == pytest.approx(1e-3)


def mixed_run() -> list[RequestRecord]:
  late = record('late', 'rejected_late', reason='tbt', placed_s=0.0)
  late.prefill_done_s, late.prefill_s = 2.0, 1.5
  late.reused_tokens = {'remote_host': 10}
  return [
    served('good', reused_tokens={'local_host': 40, 'remote_host': 20}),
    served('slow first', ttft_s=40.0),
    served('slow tokens', tbt_s=0.2),
    served('one token', tokens=1),
    record('refused', 'rejected', reason='ttft', finished_s=0.0),
    late,
    record('broken', 'failed', reason='...', placed_s=0.0, prefill_s=0.25),
    record('too long', 'failed', reason='...'),
    record('gone', 'cancelled', placed_s=0.0),
    record('waiting', 'running'),
  ]


def test_every_request_is_counted_once():
  summary = summarize(mixed_run(), SLO(30, 0.1))
  assert summary.offered == 10
  assert summary.accepted == 7
  assert summary.rejected == 1
  assert summary.rejected_late == 1
  assert summary.completed == 4
  assert summary.failed == 2
  assert summary.cancelled == 1
  assert summary.rejection_reasons == {'ttft': 1, 'tbt': 1}


def test_each_limit_is_counted_alone_and_good_by_time_and_instance():
  summary = summarize(mixed_run(), SLO(30, 0.1), 20.0, instances=4)
  assert summary.ttft_attainment == 0.3  # 'slow tokens' as well
  assert summary.tbt_attainment == 0.3  # 'slow first' as well
  assert summary.effective_per_s == 0.1
  assert summary.effective_per_s_per_instance == 0.025
  unknown = summarize(mixed_run(), SLO(30, 0.1), 20.0)
  assert unknown.effective_per_s_per_instance is None


def test_the_longest_gap_is_of_a_request():
  stalled = served('stalled')
  stalled.segments.append(TokenSegment(stalled.segments[-1].last_s + 7, 0.0, 1))
  summary = summarize([served(tbt_s=0.2), stalled], SLO())
  assert summary.longest_gap_s['p50'] == pytest.approx((0.2 + 7) / 2)
  assert latency.longest_gap_s(served(tokens=1)) is None


def test_effective_is_completed_within_both_limits_of_all_offered():
  summary = summarize(mixed_run(), SLO(30, 0.1))
  assert summary.effective == 2  # 'good' and 'one token'
  assert summary.effective_request_capacity == 0.2
  assert (summary.slo_ttft_s, summary.slo_tbt_s) == (30, 0.1)
  assert summarize(mixed_run(), SLO(100, 1.0)).effective == 4


def test_hit_rate_is_weighted_by_tokens_over_what_was_prefilled():
  summary = summarize(mixed_run(), SLO())
  # Four completed and one rejected late, 100 tokens each.
  assert summary.hit_rate == pytest.approx(70 / 500)
  assert summary.hit_rate_by_tier == {
    'local_host': pytest.approx(40 / 500),
    'remote_host': pytest.approx(30 / 500),
  }
  assert sum(summary.hit_rate_by_tier.values()) == pytest.approx(
    summary.hit_rate
  )
  long = RequestRecord('long', 900, 0.0, prefill_done_s=1.0)
  long.reused_tokens = {'local_host': 900 - 1}
  short = RequestRecord('short', 100, 0.0, prefill_done_s=1.0)
  summary = summarize([long, short], SLO())
  assert summary.hit_rate == pytest.approx(0.899)
  assert summary.hit_rate_request_mean == pytest.approx(899 / 900 / 2)


def test_latencies_are_of_completed_requests():
  summary = summarize(mixed_run(), SLO())
  assert summary.ttft_s['p50'] == pytest.approx(1.0)
  assert summary.ttft_s['mean'] == pytest.approx(43 / 4)
  assert summary.tbt_tail_s['mean'] == pytest.approx(0.3 / 3)
  assert summary.tpot_s['p99'] == pytest.approx(0.2 - 0.02 * 0.15)


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(1, 40)), min_size=1))
def test_intervals_of_all_requests_count_one_by_one(runs):
  records = [served(tbt_s=s, tokens=count) for s, count in runs]
  expanded = [s for s, count in runs for _ in range(count - 1)]
  found = summarize(records, SLO()).tbt_s
  if not expanded:
    assert set(found.values()) == {None}
    return
  assert found['mean'] == pytest.approx(np.mean(expanded))
  wanted = np.percentile(expanded, (50, 99), method='inverted_cdf')
  assert [found['p50'], found['p99']] == pytest.approx([*wanted])


def test_throughput_counts_completed_output_and_waste_is_the_rest():
  summary = summarize(mixed_run(), SLO(), duration_s=68.0)
  assert summary.output_tokens == 34
  assert summary.output_tokens_per_s == 0.5
  assert summary.wasted_prefill_s == 1.75
  assert summarize(mixed_run(), SLO()).duration_s == pytest.approx(40.5)


def test_a_run_of_nothing_has_no_latency_and_no_share():
  summary = summarize([], SLO())
  assert summary.offered == summary.effective_request_capacity == 0
  assert summary.hit_rate_by_tier == {}
  assert set(summary.ttft_s.values()) == {None}


def test_a_summary_survives_json_under_the_issues_names():
  summary = summarize(mixed_run(), SLO())
  figures = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
  assert Summary.from_dict(figures) == summary
  assert set(figures) >= set(
    'offered accepted rejected completed effective effective_request_capacity'
    ' hit_rate hit_rate_by_tier ttft_s tbt_tail_s tpot_s'.split()
  )
  del figures['tpot_s']
  with pytest.raises(ValueError, match=r"missing=\['tpot_s'\]"):
    Summary.from_dict(figures)


@given(st.floats(0.01, 900), st.floats(0.02, 500))
def test_goodput_finds_the_knee_of_a_falling_curve(knee, start_rate):
  def attainment(rate: float) -> float:
    return 1.0 if rate <= knee else 0.5

  found = goodput(attainment, start_rate=start_rate, tolerance=0.02)
  assert found.requests_per_s is not None
  assert found.bound_requests_per_s is not None
  assert found.requests_per_s <= knee < found.bound_requests_per_s
  assert found.bound_requests_per_s <= found.requests_per_s * 1.02
  assert len(found.runs) == len({rate for rate, _ in found.runs}) < 35


def test_goodput_out_of_range_says_so():
  never = goodput(lambda rate: 0.0, start_rate=1, min_rate=0.5)
  assert (never.requests_per_s, never.bound_requests_per_s) == (None, 0.5)
  always = goodput(lambda rate: 1.0, start_rate=1, max_rate=10)
  assert (always.requests_per_s, always.bound_requests_per_s) == (10, None)


@pytest.mark.parametrize(
  ('field', 'arguments'),
  [
    ('target', {'target': 1.1}),
    ('max_rate', {'start_rate': 2, 'max_rate': 1}),
    ('tolerance', {'tolerance': 0}),
  ],
)
def test_a_senseless_search_is_named(field, arguments):
  with pytest.raises(ValueError, match=f'{field}='):
    goodput(lambda rate: 1.0, **arguments)


def test_the_table_has_every_figure_under_its_name():
  summary = summarize(mixed_run(), SLO(30, 0.1))
  lines = dict(line.split() for line in table(summary).splitlines())
  assert lines['offered'] == '10'
  assert lines['effective_request_capacity'] == '0.2'
  assert lines['hit_rate_by_tier.local_host'] == '0.08'
  assert lines['ttft_s.mean'] == '10.75'
  names = {name.split('.')[0] for name in lines}
  figures = summary.to_dict()
  assert names == {name for name, value in figures.items() if value != {}}


def test_runs_are_compared_in_columns():
  runs = {
    'reuse': summarize(mixed_run(), SLO()),
    'none': summarize([served()], SLO()),
  }
  head, *lines = comparison(runs).splitlines()
  assert head.split() == ['reuse', 'none']
  assert ['offered', '10', '1'] in [line.split() for line in lines]
  assert ['rejection_reasons.ttft', '1', '-'] in [x.split() for x in lines]


def test_figures_within_figures_have_dotted_names():
  nested = {'a': 1, 'b': {'c': 2, 'd': {'e': None}}}
  assert flat(nested) == {'a': 1, 'b.c': 2, 'b.d.e': None}
