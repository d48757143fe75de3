# SPDX-License-Identifier: Apache-2.0
"""The Master's LRU and LFU give the published traces' known hit rates."""

import pytest

from mooncake_jax.store.eviction import lfu
from mooncake_jax.store.eviction import lru
from mooncake_jax.workload.trace import load_trace
from scripts import trace_hits
from scripts.hit_table import published

WAYS = {
  'lru': (trace_hits.exact, lru),
  'lfu': (trace_hits.exact_block_by_block, lfu),
}


@pytest.fixture(scope='module')
def rows(traces):
  def load(name):
    return load_trace(traces / f'{name}_trace.jsonl')[0]

  return {name: load(name) for name in ('conversation', 'synthetic')}


@pytest.mark.parametrize(
  ('trace', 'policy', 'capacity'),
  [
    ('conversation', 'lru', 10_000),
    ('conversation', 'lru', 200),
    ('conversation', 'lfu', 5_860),
    ('synthetic', 'lru', 5_860),
    ('synthetic', 'lru', 1_000),
    ('synthetic', 'lfu', 10_000),
    ('synthetic', 'lfu', 200),
  ],
)
def test_exact_policies_reach_the_known_hit_rates(
  rows, trace, policy, capacity
):
  way, order = WAYS[policy]
  hits = way(rows[trace], capacity, order)
  by_token, by_request = published(trace, policy, capacity)
  assert hits.by_token == pytest.approx(by_token, abs=0.005)
  assert hits.by_request == pytest.approx(by_request, abs=0.005)


def test_the_default_configuration_stays_close_to_exact_lru(rows):
  """Complete blocks alone, 5 % kept free, batches, leases of 10 s."""
  hits = trace_hits.default(rows['synthetic'], 5_860)
  by_token, _ = published('synthetic', 'lru', 5_860)
  assert hits.by_token == pytest.approx(by_token, abs=0.03)
