# SPDX-License-Identifier: Apache-2.0
"""Placement policies and what the Conductor believes."""

import numpy as np
import pytest

from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.conductor.prefix_index import Match
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.slo import SLO


def _place(conductor, request, now_s) -> Placement:
  placed = conductor.place(request, now_s)
  assert isinstance(placed, Placement), placed
  return placed


def test_the_index_matches_to_the_first_miss():
  index = PrefixIndex()
  index.add('a', [b'1', b'2', b'5'])
  index.add('b', [b'1', b'2', b'4'])
  index.expect('a', [b'3'])
  keys = (b'1', b'2', b'3', b'4', b'5')
  assert index.match(keys) == {'a': Match(2, 3), 'b': Match(2, 2)}
  index.unexpect('a', [b'3'])
  index.discard('b', [b'2', b'9'])
  assert index.match(keys) == {'a': Match(2, 2), 'b': Match(1, 1)}
  index.forget('a')
  assert index.match(keys) == {'b': Match(1, 1)}


def test_requests_of_one_prefix_follow_each_other_before_it_is_stored():
  conductor = make_conductor(policy='cache_aware')
  prompt = np.arange(40) + 2
  first = _place(conductor, make_request('a', prompt), 0.0)
  second = _place(conductor, make_request('b', prompt), 0.0075)
  assert second.prefill == first.prefill
  assert second.local_blocks == 4


def test_beliefs_follow_events():
  conductor = make_conductor()
  request = make_request('a', np.arange(40) + 2)
  placed = _place(conductor, request, 0.0)
  other = next(n for n in SPEC.prefill_names if n != placed.prefill)
  conductor.observe(BlocksStored(0.1, other, request.block_keys))
  conductor.observe(PrefillDone(0.2, 'a', 0, placed.prefill))
  conductor.observe(Finished(0.3, 'a', 0, placed.decode))
  again = _place(conductor, make_request('b', np.arange(40) + 2), 1.0)
  assert (again.prefill, again.local_blocks, again.queue_s) == (other, 4, 0.0)
  conductor.observe(BlocksEvicted(1.1, other, request.block_keys))
  conductor.observe(Finished(1.2, 'b', 0, placed.decode))
  last = _place(conductor, make_request('c', np.arange(40) + 2), 2.0)
  assert last.local_blocks == 0


def test_a_queue_counts_what_stands_in_it_and_runs_down():
  conductor = make_conductor(policy='load_balancing')
  a, b, c = (
    _place(conductor, make_request(n, np.full(100, i + 2)), 0.0)
    for i, n in enumerate('abc')
  )
  assert {a.prefill, b.prefill} == set(SPEC.prefill_names)
  assert c.queue_s == pytest.approx(a.prefill_s)
  d = _place(conductor, make_request('d', np.full(100, 9)), 0.004)
  assert d.queue_s == pytest.approx(a.prefill_s - 0.004)


def test_decode_goes_to_the_lighter_batch():
  conductor = make_conductor()
  first = _place(conductor, make_request('a', np.full(90, 3)), 0.0)
  second = _place(conductor, make_request('b', np.full(30, 4)), 0.0)
  third = _place(conductor, make_request('c', np.full(30, 5)), 0.0)
  assert second.decode != first.decode
  assert third.decode == second.decode or third.tbt_s >= second.tbt_s


def test_admission_none_admits_what_early_rejection_refuses():
  slo = SLO(ttft_s=1e-4, tbt_s=1.0)
  request = make_request('a', np.full(90, 3))
  refused = make_conductor(slo=slo).place(request, 0.0)
  assert isinstance(refused, Rejection)
  assert refused.reason == 'ttft' and refused.ttft_s > slo.ttft_s
  taken = make_conductor(slo=slo, admission='none').place(request, 0.0)
  assert isinstance(taken, Placement)
  slo = SLO(ttft_s=1.0, tbt_s=1e-4)
  refused = make_conductor(slo=slo).place(request, 0.0)
  assert isinstance(refused, Rejection) and refused.reason == 'tbt'


@pytest.mark.parametrize(
  'kwargs',
  [{'policy': 'best'}, {'admission': 'maybe'}, {'balancing_threshold': 0.5}],
)
def test_a_bad_spec_is_named(kwargs):
  with pytest.raises(ValueError, match=next(iter(kwargs))):
    ConductorSpec(**kwargs)
