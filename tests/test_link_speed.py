# SPDX-License-Identifier: Apache-2.0
"""Links as they were measured, and costs that believe them."""

from dataclasses import replace
import time

import pytest

from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.costs.links import measure_link
from mooncake_jax.costs.links import with_links
from tests.cost_pieces import polynomial

COSTS = polynomial()
FAST, SLOW = LinkSpeed(1e-3, 2e9), LinkSpeed(4e-3, 1e8)


def test_costs_take_the_median_of_what_was_measured():
  costs = with_links(COSTS, [FAST, SLOW, SLOW])
  for link in ('copy', 'handoff'):
    assert costs.transfer_s(10**8, link) == pytest.approx(1.004)
  assert costs.transfer_s(10**8, 'onload') == COSTS.transfer_s(10**8, 'onload')
  assert replace(costs, **_links_of(COSTS)) == COSTS


def _links_of(costs) -> dict[str, float]:
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
