# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on the same devices: one step at a time."""

from dataclasses import replace

import hypothesis
from hypothesis import strategies as st
import pytest

from engine_pieces import decode_row
from engine_pieces import Desk
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import LOOSE
from lifecycle import make_conductor
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import TransferOp
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.metrics.latency import tbt_percentile
from mooncake_jax.request import Placement
from mooncake_jax.serve import Decision
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend

PAIRS = replace(SPEC, colocated=True, streaming='chunks')
ROWS = DecodeBatch(
  (
    DecodeRow('a', 0, None, 9, (1,), 30),
    DecodeRow('b', 0, None, 29, (2,), 40),
  )
)
CHUNK = PrefillChunk('r', 0, 0, 10, (1,))


def _backend() -> VirtualBackend:
  return VirtualBackend(COSTS, LAYERS, partners={'p': 'd'})


def _drain(backend):
  done = []
  while completions := backend.wait(None):
    done += completions
  return done


def _token_times(completions):
  return [
    time_s
    for completion in completions
    for emitted in completion.steps
    for row in emitted.rows
    if row.request_id == 'a'
    for time_s in (row.segment.token_s(i) for i in range(row.segment.count))
  ]


def _plain(steps):
  """Seconds of the first steps without a chunk, one by one."""
  return [COSTS.decode_step_s(2, 40 + 2 * i) for i in range(steps)]


def test_a_chunk_holds_up_the_tokens_of_its_step():
  backend = _backend()
  backend.decode('d', ROWS, 5)
  backend.prefill('p', CHUNK)
  completions = _drain(backend)
  mixed_s = COSTS.prefill_s(10, 0) + COSTS.riding_s(2, 40)
  times = _token_times(completions)
  steps = [COSTS.decode_step_s(2, 42 + 2 * i) for i in range(4)]
  assert times[0] == completions[0].time_s == pytest.approx(mixed_s)
  assert times[-1] == pytest.approx(mixed_s + sum(steps))
  assert len(times) == 5
  assert [c.done for c in completions if c.steps] == [False, True]


def test_a_batch_rides_for_less_than_a_step_of_its_own():
  assert 0 < COSTS.riding_s(2, 40) < COSTS.decode_step_s(2, 40)
  assert COSTS.riding_s(0, 0) == 0


@hypothesis.given(st.floats(0.01, 0.99))
def test_a_chunk_that_comes_during_a_step_waits_for_its_end(share):
  backend = _backend()
  backend.decode('d', ROWS, 20)
  first_s, second_s = _plain(2)
  assert backend.wait(first_s + share * second_s) == []
  backend.prefill('p', CHUNK)
  done = _drain(backend)
  (chunk,) = [c for c in done if not c.steps]
  assert chunk.started_s == pytest.approx(first_s + second_s, rel=1e-2)
  assert len(_token_times(done)) == 20


def test_who_joins_as_a_chunk_ends_is_in_the_next_step():
  backend = _backend()
  backend.prefill('p', CHUNK)
  (first,) = backend.wait(None)
  # The chunk's own request decodes, and another chunk comes, at that moment.
  assert backend.wait(backend.now_s()) == []
  backend.prefill('p', CHUNK)
  backend.decode('d', ROWS, 1)
  done = backend.wait(None)
  assert {c.time_s for c in done} == {done[0].time_s} and len(done) == 2
  assert _token_times(done)[0] == done[0].time_s > first.time_s


@hypothesis.given(st.floats(0, 0.02))
def test_a_cancelled_decode_ends_at_the_next_boundary(cut_s):
  backend = _backend()
  work = backend.decode('d', ROWS, 30)
  backend.prefill('p', CHUNK)
  done = backend.wait(cut_s)
  backend.cancel(work)
  done += _drain(backend)
  times = _token_times(done)
  assert [c.done for c in done if c.steps][-1]
  assert len([t for t in times if t > cut_s + 1e-9]) <= 1 <= len(times)


def test_pages_do_not_move_within_a_device():
  backend = _backend()
  ends = DevicePages('p', (1,)), DevicePages('d', (1,))
  backend.transfer((TransferOp(*ends, 0, 2, 10**9),), 1, 100.0)
  (done,) = backend.wait(None)
  assert (done.status, done.time_s) == ('completed', 0.0)


def _serve(spec, requests, **rules):
  backend = VirtualBackend(COSTS, LAYERS, partners=spec.partners)
  cluster = Cluster(spec, MODEL, backend, costs=COSTS)
  records, journal = serve(requests, make_conductor(spec, **rules), cluster)
  cluster.check()
  return records, journal


@pytest.mark.parametrize('policy', ['random', 'kvcache_centric'])
def test_a_request_decodes_where_it_was_prefilled(policy):
  requests = shared_prefix_requests(20, output=9, every_s=2e-3)
  records, journal = _serve(PAIRS, requests, policy=policy)
  assert {r.outcome for r in records} == {'completed'}
  placed = [e.decision for e in journal if isinstance(e, Decision)]
  pairs = {
    (at.prefill, at.decode) for at in placed if isinstance(at, Placement)
  }
  assert pairs == {('prefill0', 'decode0'), ('prefill1', 'decode1')}


def test_a_pair_takes_requests_only_while_both_are_there():
  conductor = make_conductor(PAIRS)
  conductor.drain('decode0')
  for request in shared_prefix_requests(4):
    placed = conductor.place(request, 0.0)
    assert isinstance(placed, Placement) and placed.prefill == 'prefill1'


def test_the_longer_the_chunk_the_longer_the_gap_between_tokens():
  requests = shared_prefix_requests(24, 60, 40, output=20, every_s=4e-3)
  gaps = []
  for chunk_tokens in (12, 48):
    spec = replace(PAIRS, chunk_tokens=chunk_tokens, reuse=False)
    records, _ = _serve(spec, requests)
    assert {r.num_output_tokens for r in records} == {20}
    gaps.append(max(tbt_percentile(r, 100) or 0.0 for r in records))
  spec = replace(SPEC, reuse=False)
  alone = max(tbt_percentile(r, 90) or 0.0 for r in _serve(spec, requests)[0])
  assert alone < gaps[0] < gaps[1]


def test_a_thread_for_two_instances_gives_the_tokens_of_one_alone():
  specs = (
    tiny_spec('p', role='prefill'),
    tiny_spec('d', role='decode', shares_with='p'),
  )
  with tiny_backend(*specs) as backend:
    warmup(backend)
    owners = {i.stages[0].owner for i in backend.instances.values()}
    assert len(owners) == 1
    desk, tokens = Desk(backend), random_tokens(64, seed=3)
    first = desk.prefill('p', tokens[:16], range(1, 9))
    for start in (1, 20):  # the same pages at first, then others
      ends = tuple(range(1, 5)), tuple(range(start, start + 4))
      desk.move(DevicePages('p', ends[0]), DevicePages('d', ends[1]))
    alone = desk.decode('d', first, 16, range(20, 37), 40)
    row = decode_row('r', first, 16, range(1, 18), 40)
    work = backend.decode('d', DecodeBatch((row,)), 40)
    again = desk.prefill('p', tokens, range(1, 18), chunk=8)
    assert desk.end_of(work).status == 'completed'
    assert desk.tokens_of(work) == alone
    assert again == desk.prefill('p', tokens, range(40, 57))


def test_who_shares_names_one_that_is_there():
  for specs in (
    (tiny_spec('d', shares_with='p'), tiny_spec('p')),
    (tiny_spec('d', shares_with='d'),),
  ):
    with pytest.raises(ValueError, match='shares_with='):
      tiny_backend(*specs)


@pytest.mark.parametrize(
  ('changes', 'name'),
  [
    ({'decode_instances': 3}, 'decode_instances'),
    ({'streaming': 'layers'}, 'streaming'),
    ({'stages': 3}, 'stages'),
  ],
)
def test_what_can_not_be_colocated_is_refused(changes, name):
  with pytest.raises(ValueError, match=name):
    replace(PAIRS, **changes)


def test_roles_of_pairs_do_not_change():
  rules = ConductorSpec(roles=RoleRules())
  with pytest.raises(ValueError, match=r'ConductorSpec\.roles'):
    Conductor(rules, PAIRS, MODEL, COSTS, LOOSE)
  backend = VirtualBackend(COSTS, LAYERS, partners=PAIRS.partners)
  with pytest.raises(ValueError, match='shares its devices'):
    Cluster(PAIRS, MODEL, backend).set_role('prefill0', 'decode')
