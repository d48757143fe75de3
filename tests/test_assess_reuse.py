# SPDX-License-Identifier: Apache-2.0
"""What could be reused: chains, stack distances, figures of a trace."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from mooncake_jax.assess.chains import chains
from mooncake_jax.assess.reuse import measure_reuse
from mooncake_jax.assess.stack import stack_hits
from mooncake_jax.assess.window import busiest
from mooncake_jax.workload.clients import client_mix
from mooncake_jax.workload.generate import conversation
from mooncake_jax.workload.statistics import trace_statistics
from mooncake_jax.workload.tokens import trace_block_keys
from mooncake_jax.workload.trace import TraceRow
from trace_strategies import traces_of as trace_rows

SIZES = st.sampled_from([1, 2, 4, 8, 16, 32])


def keys_of(rows, per_id, size):
  """Keys of blocks that a hit may save, as the simulator has them."""
  return [
    trace_block_keys(row, per_id, size)[: (row.input_tokens - 1) // size]
    for row in rows
  ]


def lru_hit_tokens(rows, per_id, size, capacity_blocks):
  """By keeping the blocks themselves: tails used before heads."""
  kept, hits = OrderedDict(), 0
  for row in rows:
    keys = trace_block_keys(row, per_id, size)
    usable = (row.input_tokens - 1) // size
    for key in keys[:usable]:
      if key not in kept:
        break
      hits += size
    for key in reversed(keys):
      kept[key] = None
      kept.move_to_end(key)
    while len(kept) > capacity_blocks:
      kept.popitem(last=False)
  return hits


@given(trace_rows(8), SIZES)
def test_possible_hits_are_those_of_a_store_without_bounds(rows, size):
  found = measure_reuse(rows, 8, size)
  assert found is not None
  seen, hits, total = set(), 0, 0
  for row, usable in zip(rows, keys_of(rows, 8, size)):
    for key in usable:
      if key not in seen:
        break
      hits += size
    seen.update(trace_block_keys(row, 8, size))
    total += row.input_tokens
  assert found.hit_rate == pytest.approx(hits / total)
  own = [w for w in found.working_sets if w.block_size_tokens == size]
  assert all(w.hit_rate == pytest.approx(hits / total) for w in own)
  assert all(w.unique_tokens == size * len(seen) for w in own)


@given(trace_rows(8), st.integers(1, 30))
def test_one_pass_gives_the_hits_of_every_capacity(rows, blocks):
  found, num_links = chains(rows, 8, 8)
  hits = [
    int(hit.tokens[hit.distance_tokens <= 8 * blocks].sum())
    for hit in stack_hits(found, num_links)
  ]
  assert sum(hits) == lru_hit_tokens(rows, 8, 8, blocks)


@given(trace_rows(8))
def test_a_head_is_never_further_away_than_its_tail(rows):
  for hit in stack_hits(*chains(rows, 8, 4)):
    assert (np.diff(hit.distance_tokens) >= 0).all()


def test_shares_add_up_and_rise():
  rows = conversation(600)
  found = measure_reuse(rows, 512, 512)
  assert found is not None
  assert found.hit_rate == pytest.approx(
    trace_statistics(rows).hit_rate, abs=5e-3
  )
  rates = [rate for _, rate in found.curve]
  assert rates == sorted(rates) and rates[-1] == pytest.approx(found.hit_rate)
  rooms = [*found.capacity_tokens.values()]
  assert rooms == sorted(rooms)
  assert [*found.by_age_s.values()] == sorted(found.by_age_s.values())
  assert found.by_prefix[0].prompts == pytest.approx(found.hit_prompts)
  assert found.by_prefix[0].tokens == pytest.approx(found.hit_rate)


def test_tenants_share_nothing():
  def row(time_s, tenant):
    return TraceRow(time_s, 1000, 1, (1, 2), tenant=tenant)

  rows = [row(0, 'a'), row(1, 'b'), row(2, 'a')]
  found = measure_reuse(rows, 512, 512)
  assert found is not None
  by_name = {t.tenant: t.hit_rate for t in found.by_tenant}
  assert by_name == {'a': 512 / 2000, 'b': 0.0}


def test_without_hashes_nothing_is_known():
  assert (
    measure_reuse([TraceRow(0.0, 9, 1, (0,), hashed=False)], 512, 16) is None
  )
  with pytest.raises(ValueError, match='must be >= 1'):
    measure_reuse([], 512, 16)
  with pytest.raises(ValueError, match='block_size_tokens=48 must divide'):
    measure_reuse(conversation(2), 512, 48)


def test_the_busiest_part_has_most_tokens_a_second():
  rows = client_mix(400, 5.0)
  first, part = busiest(rows, 50)
  assert part[0].timestamp_s == 0.0 and len(part) == 50

  def load(start):
    chosen = rows[start : start + 50]
    tokens = sum(r.input_tokens + r.output_tokens for r in chosen)
    return tokens / (chosen[-1].timestamp_s - chosen[0].timestamp_s)

  assert load(first) == max(map(load, range(351)))
  second, other = busiest(rows, 50, after=1)
  assert other and abs(second - first) >= 50
  assert busiest(rows, 400)[0] == 0 and busiest(rows, 300, after=1)[1] == []
