# SPDX-License-Identifier: Apache-2.0
"""Links as they were measured, and costs that believe them."""

from dataclasses import replace
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mooncake_jax.costs.links import fitted
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.costs.links import measure_link
from mooncake_jax.costs.links import with_bandwidth
from mooncake_jax.costs.links import with_links
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.perturbed import PerturbedCost
from mooncake_jax.costs.table import Line
from mooncake_jax.costs.table import TableCost
from tests.cost_pieces import polynomial

COSTS = polynomial()
FAST, SLOW = LinkSpeed(1e-3, 2e9), LinkSpeed(4e-3, 1e8)


def test_costs_take_the_median_of_what_was_measured():
  costs = with_links(COSTS, [FAST, SLOW, SLOW])
  for link in ('copy', 'handoff'):
    assert costs.transfer_s(10**8, link) == pytest.approx(1.004)
  assert costs.transfer_s(10**8, 'onload') == COSTS.transfer_s(10**8, 'onload')
  assert isinstance(costs, PolynomialCost)
  assert replace(costs, **_links_of(COSTS)) == COSTS


@pytest.mark.parametrize('wrap', [TableCost.__name__, PerturbedCost.__name__])
def test_links_change_wherever_they_are_kept(wrap):
  line = Line(512, 0.1, 0.0)
  costs = {
    'TableCost': TableCost((line,), (line,), COSTS),
    'PerturbedCost': PerturbedCost(COSTS, transfer_bias=2.0),
  }[wrap]
  quarter = with_bandwidth(costs, 0.25, ['copy'])
  more_s = quarter.transfer_s(10**9, 'copy') - costs.transfer_s(10**9, 'copy')
  assert more_s == pytest.approx(3 * (2 if wrap == 'PerturbedCost' else 1))
  assert quarter.prefill_s(512, 0) == costs.prefill_s(512, 0)
  measured = with_links(costs, [SLOW])
  assert measured.transfer_s(10**8, 'copy') > costs.transfer_s(10**8, 'copy')


def test_costs_without_lines_are_refused_not_left_alone():
  class Own(CostModel):
    """Somebody's, with links of another form."""

    def prefill_s(self, chunk_tokens, prefix_tokens):
      return 1.0

    def decode_step_s(self, batch_size, context_tokens):
      return 1.0

    def transfer_s(self, num_bytes, link):
      return 1.0

  with pytest.raises(ValueError, match='Own has no line a link'):
    with_bandwidth(Own(), 0.5)


def _links_of(costs: Any) -> dict[str, float]:
  names = [
    f'{link}_{what}'
    for link in ('copy', 'handoff')
    for what in ('bytes_per_s', 'latency_s')
  ]
  return {name: getattr(costs, name) for name in names}


def test_nothing_measured_is_no_belief():
  with pytest.raises(ValueError, match='no link'):
    with_links(COSTS, [])


def test_a_link_that_sleeps_is_measured_by_its_sleep():
  """What sleeps too long makes it slower, never faster."""

  def send(count: int) -> None:
    time.sleep(0.01 + count * 0.005)

  speed = measure_link(send, 1000, 10**6)
  assert speed.bytes_per_s <= 1000 / 0.005 * 2
  assert speed.transfer_s(1000) >= 0.014


@given(st.floats(0, 1e-2), st.floats(1e3, 1e12))
def test_a_line_is_found_as_it_is(latency_s, bytes_per_s):
  link = LinkSpeed(latency_s, bytes_per_s)
  found = fitted(100, {n: link.transfer_s(100 * n) for n in (1, 2, 4, 8)})
  for count in (1, 3, 16):
    expected_s = link.transfer_s(100 * count)
    assert found.transfer_s(100 * count) == pytest.approx(expected_s, rel=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8))
def test_no_times_make_a_link_that_gives_time_back(times_s):
  link = fitted(100, {2**i: seconds for i, seconds in enumerate(times_s)})
  assert link.latency_s >= 0 and link.bytes_per_s > 0


@pytest.mark.parametrize('first_s, each_s', [(4e-3, 5e-4), (0.0, 2e-3)])
def test_a_link_that_gets_quicker_is_predicted_at_all_sizes(first_s, each_s):
  """By what the first and many together take, 3 would be 20 % off."""

  def takes_s(count: int) -> float:
    return first_s + count * each_s + min(count, 4) * 1e-3

  link = fitted(100, {n: takes_s(n) for n in (1, 2, 4, 8, 16, 32)})
  for count in (1, 3, 6, 12, 24):
    off = link.transfer_s(100 * count) / takes_s(count) - 1
    assert abs(off) < 0.18, (count, off)
