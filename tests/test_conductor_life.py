# SPDX-License-Identifier: Apache-2.0
"""Admission, retries, expiry, lost telemetry and explanations."""

from dataclasses import replace
import itertools
import zlib

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.decode_horizon import DecodeHorizon
from mooncake_jax.conductor.output_lengths import OutputLengths
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Failed
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory
from mooncake_jax.events import TokensEmitted
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import write_journal
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import TokenSegment
from mooncake_jax.serve import Decision
from mooncake_jax.serve import replay
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO


def ask(name, length=30, output=5, arrival_s=0.0, **kwargs):
  prompt = np.full(length, 2 + zlib.crc32(name.encode()) % 40)
  return make_request(name, prompt, output, arrival_s, **kwargs)


def simulated(spec=SPEC, costs=COSTS, recheck=None, **kwargs) -> Cluster:
  return Cluster(spec, MODEL, VirtualBackend(costs, LAYERS, **kwargs), recheck)


def fill(conductor, count, length=90, output=30):
  """Places so many requests that decode already."""
  for i in range(count):
    placed = conductor.place(ask(f'f{i}', length, output), 0.0)
    assert isinstance(placed, Placement), placed
    first = Emitted(((f'f{i}', 0),), TokenSegment(0.0, 0.0, 1))
    conductor.observe(TokensEmitted(0.0, placed.decode, first))


def test_a_rejection_says_when_to_ask_again():
  conductor = make_conductor(
    slo=SLO(0.03, 1.0), admission='slo_predictive', policy='load_balancing'
  )
  decisions = [conductor.place(ask(f'r{i}', 90), 0.0) for i in range(8)]
  refused = next(d for d in decisions if isinstance(d, Rejection))
  assert (refused.reason, refused.ttft_s > 0.03) == ('ttft', True)
  wait_s = refused.retry_after_s or 0.0
  assert wait_s == pytest.approx(refused.ttft_s - 0.03)
  again = conductor.place(ask('again', 90), wait_s + 1e-6)
  assert isinstance(again, Placement)
  hopeless = make_conductor(slo=SLO(1e-3, 1.0)).place(ask('x', 90), 0.0)
  assert isinstance(hopeless, Rejection) and hopeless.retry_after_s is None


def test_early_rejection_reads_decode_now_and_the_predicted_one_then():
  """A full batch that will have ended by then, and one that will come."""
  spec = replace(SPEC, decode_instances=1, max_batch=64)
  slo = SLO(30.0, COSTS.decode_step_s(3, 3 * 90))
  answers = {}
  for admission in ('none', 'early_rejection', 'early_rejection_predicted'):
    conductor = make_conductor(
      spec, slo, admission='none', decode_duration_s=0.05
    )
    fill(conductor, 5)
    conductor.spec = replace(conductor.spec, admission=admission)
    conductor.view.prefill.add('prefill0', 'x', 9.0, 0.0)
    conductor.view.prefill.add('prefill1', 'y', 9.0, 0.0)
    answers[admission] = type(conductor.place(ask('r', 90), 0.01))
  assert answers == {
    'none': Placement,
    'early_rejection': Rejection,
    'early_rejection_predicted': Placement,
  }


def test_load_admission_refuses_by_ttft_at_once_and_by_tbt_after_prefill():
  spec = replace(SPEC, prefill_instances=2, decode_instances=1, max_batch=8)
  slo = SLO(ttft_s=0.04, tbt_s=0.00235)
  rules = ConductorSpec(admission='load', policy='load_balancing')
  assert rules.checks_late
  conductor = Conductor(rules, spec, MODEL, COSTS, slo)
  requests = [ask(f'r{i}', 50, 20) for i in range(12)]
  records, _ = serve(
    requests, conductor, simulated(spec, recheck=conductor.keeps_tbt)
  )
  summary = summarize(records, slo)
  assert summary.rejected and summary.rejected_late
  late = [r for r in records if r.outcome == 'rejected_late']
  assert summary.wasted_prefill_s == pytest.approx(
    sum(r.prefill_s for r in late)
  )
  assert summary.wasted_prefill_s > 0


def test_slo_predictive_refuses_what_would_miss_and_nothing_else():
  """Each one refused is served once more, alone against the same past."""
  slo = SLO(ttft_s=0.05, tbt_s=1.0)
  requests = [ask(f'r{i}', 40 + 17 * i % 50, 3, 0.004 * i) for i in range(40)]
  rules = {'slo': slo, 'policy': 'load_balancing'}
  admitted = make_conductor(admission='slo_predictive', **rules)
  records, _ = serve(requests, admitted, simulated())
  outcomes = [r.outcome for r in records]
  assert {'completed', 'rejected'} == set(outcomes)
  for record in records:
    if record.outcome == 'completed':
      assert record.ttft_s and record.ttft_s <= slo.ttft_s * 1.05
  for i in [i for i, o in enumerate(outcomes) if o == 'rejected'][:6]:
    kept = [r for r, o in zip(requests[:i], outcomes) if o == 'completed']
    forced = make_conductor(admission='none', **rules)
    again, _ = serve([*kept, requests[i]], forced, simulated())
    assert (again[-1].ttft_s or 0.0) > slo.ttft_s * 0.95


def test_low_priorities_leave_room():
  slo = SLO(ttft_s=0.05, tbt_s=1.0)
  decided = {}
  for priority in (-1, 0, 1):
    conductor = make_conductor(slo=slo, admission='slo_predictive')
    for name in SPEC.prefill_names:
      conductor.view.prefill.add(name, f'x{name}', 0.03, 0.0)
    request = ask('r', 40, priority=priority)
    decided[priority] = type(conductor.place(request, 0.0))
  assert decided == {-1: Rejection, 0: Placement, 1: Placement}


def test_nothing_is_placed_where_no_instance_is():
  conductor = make_conductor()
  for name in SPEC.prefill_names:
    conductor.observe(InstanceLost(0.0, name))
  refused = conductor.place(ask('a'), 0.1)
  assert isinstance(refused, Rejection) and refused.reason == 'no_instance'
  conductor.observe(InstanceJoined(0.2, 'prefill1', 'prefill'))
  placed = conductor.place(ask('b'), 0.3)
  assert isinstance(placed, Placement) and placed.prefill == 'prefill1'


def test_an_instance_takes_the_other_role():
  conductor = make_conductor()
  conductor.drain('decode1')
  conductor.observe(InstanceJoined(0.0, 'decode1', 'prefill'))
  placed = [conductor.place(ask(f'r{i}'), 0.0) for i in range(20)]
  seen = {p.prefill for p in placed if isinstance(p, Placement)}
  assert seen == {'prefill0', 'prefill1', 'decode1'}


def test_a_reservation_expires_though_nobody_says_that_it_ended():
  conductor = make_conductor()
  conductor.place(ask('a'), 0.0)
  assert len(conductor.view.placed) == 1
  conductor.place(ask('b', arrival_s=121.0), 121.0)
  assert [p.request.request_id for p in conductor.view.placed] == ['b']
  conductor.view.check()


def _spoils(count):
  """The first `count` chunks fail."""
  left = itertools.count()

  def spoil(completion):
    if completion.token is None and completion.op_status == ():
      if not completion.steps and next(left) < count:
        return replace(completion, status='failed', error='spoilt')
    return completion

  return spoil


@pytest.mark.parametrize(
  ('count', 'outcome'), [(1, 'completed'), (3, 'failed')]
)
def test_a_try_that_an_instance_failed_is_made_again_elsewhere(count, outcome):
  conductor = make_conductor()
  requests = [ask('r', 10)]
  records, journal = serve(requests, conductor, simulated(spoil=_spoils(count)))
  tries = [e for e in journal if isinstance(e, Decision)]
  assert [t.attempt for t in tries] == list(range(min(count + 1, 3)))
  assert tries[0].decision.prefill != tries[1].decision.prefill  # pyright: ignore
  assert records[0].outcome == outcome
  if outcome == 'completed':
    assert records[0].attempt == 1 and records[0].num_output_tokens == 5
  assert replay(journal, requests, make_conductor()) == [
    t.decision for t in tries
  ]


def test_the_journal_keeps_why_on_demand_and_changes_nothing(tmp_path):
  requests = [ask(f'r{i}', 10 + i) for i in range(4)]
  journals = []
  for keeps in (False, True):
    conductor = make_conductor(keep_explanations=keeps)
    cluster = simulated(spoil=_spoils(1))
    journals.append(serve(requests, conductor, cluster)[1])
  plain, kept = journals
  assert plain == [
    replace(e, why=None) if isinstance(e, Decision) else e for e in kept
  ]
  tries = [e for e in kept if isinstance(e, Decision)]
  assert [t.attempt for t in tries] == [0, 0, 0, 0, 1]
  assert all(t.why and t.why.decision == t.decision for t in tries)
  verdicts = {c.instance: c.verdict for c in tries[-1].why.prefill}  # pyright: ignore
  assert verdicts[tries[-1].avoid[0]] == 'failed an earlier try'
  write_journal(tmp_path / 'events.jsonl', kept)
  assert read_journal(tmp_path / 'events.jsonl') == kept


def test_late_events_of_an_old_try_change_nothing():
  conductor = make_conductor()
  request = ask('r')
  first = conductor.place(request, 0.0)
  assert isinstance(first, Placement)
  conductor.observe(Failed(0.1, 'r', 0, first.prefill, 'lost', True))
  second = conductor.place(request, 0.2, 1, frozenset({first.prefill}))
  assert isinstance(second, Placement) and second.prefill != first.prefill
  before = conductor.view.decode.rows_I.copy()
  conductor.observe(Failed(0.3, 'r', 0, first.prefill, 'late', True))
  assert (conductor.view.decode.rows_I == before).all()


@pytest.mark.parametrize(
  'telemetry', [Telemetry(0.5), Telemetry(loss=0.3), Telemetry(0.1, 0.6, 3)]
)
def test_bad_telemetry_costs_time_and_loses_nobody(telemetry):
  requests = shared_prefix_requests(60, every_s=0.004)
  means = []
  for line in (Telemetry(), telemetry):
    conductor = make_conductor(policy='cost_based', telemetry=line)
    records, _ = serve(requests, conductor, simulated())
    assert [r.outcome for r in records] == ['completed'] * 60
    means.append(summarize(records, SLO()).ttft_s['mean'] or 0.0)
  assert means[1] < 3 * means[0]


@pytest.mark.parametrize('chunking', ['fixed', 'dynamic', 'auto'])
@pytest.mark.parametrize('stages', [1, 3])
def test_an_oracle_predicts_a_lone_request_exactly(stages, chunking):
  spec = replace(SPEC, stages=stages, chunking=chunking)
  cluster = Cluster(
    spec,
    MODEL,
    VirtualBackend(COSTS, spec.layers_of_stages(MODEL)),
    costs=COSTS,
  )
  records, _ = serve([ask('r', 90, 9)], make_conductor(spec), cluster)
  errors = summarize(records, SLO()).prediction_errors
  for term in ('queue', 'transfer', 'prefill', 'ttft'):
    assert errors[term]['p99_s'] == pytest.approx(0.0, abs=1e-9), term
  assert abs(errors['tbt']['bias_s']) < 1e-3


def test_an_explanation_is_the_decision_and_why():
  conductor = make_conductor(policy='cost_based')
  for i in range(3):
    conductor.place(ask('a' * (i + 1), 40), 0.0)
  for name in SPEC.prefill_names:
    keys = ask('b', 60).block_keys[:3]
    conductor.observe(BlocksStored(0.0, name, keys))
  told = conductor.explain(ask('b', 60), 0.001)
  placed = conductor.place(ask('b', 60), 0.001)
  assert told.decision == placed and isinstance(placed, Placement)
  chosen = [c for c in told.prefill if c.verdict == 'chosen']
  assert [c.instance for c in chosen] == [placed.prefill]
  assert chosen[0].ttft_s == pytest.approx(placed.ttft_s)
  tiers = (chosen[0].device_blocks, chosen[0].host_blocks, chosen[0].ssd_blocks)
  assert tiers == (0, placed.local_blocks, 0)
  assert chosen[0].score == min(c.score for c in told.prefill)
  assert [d.instance for d in told.decode if d.verdict == 'chosen'] == [
    placed.decode
  ]
  assert all(name in str(told) for name in SPEC.prefill_names)


def test_a_restarted_conductor_knows_what_instances_hold():
  request = ask('a', 40)
  conductor = make_conductor(policy='cache_aware')
  conductor.rebuild([Inventory(0.0, 'prefill1', request.block_keys)])
  placed = conductor.place(request, 0.0)
  assert isinstance(placed, Placement)
  assert (placed.prefill, placed.local_blocks) == ('prefill1', 4)


def test_instances_that_differ_are_believed_to():
  """Half the memory, double the speed: work and reservations follow."""
  fast = replace(
    belief_of(SPEC, MODEL, COSTS),
    costs=replace(COSTS, prefill_s_per_token=1e-5, prefill_base_s=1e-4),
  )
  small = replace(belief_of(SPEC, MODEL, COSTS), decode_pool_tokens=40)
  conductor = Conductor(
    ConductorSpec(policy='load_balancing', admission='none'),
    SPEC,
    MODEL,
    COSTS,
    SLO(),
    {'prefill1': fast, 'decode0': small},
  )
  placed = [conductor.place(ask(f'r{i}', 90), 0.0) for i in range(12)]
  at = [p.prefill for p in placed if isinstance(p, Placement)]
  assert at.count('prefill1') > 2 * at.count('prefill0')
  assert {p.decode for p in placed if isinstance(p, Placement)} == {'decode1'}


def test_of_a_length_that_nobody_knows_the_limit_and_the_prior_are_used():
  """Some 20 tokens where more is allowed; room for all of it."""
  conductor = make_conductor(prior_output_tokens=20)

  def seen(output):
    (candidate, *_) = conductor.explain(ask('r', 60, output), 0.0).decode
    return candidate.mean_step_s, candidate.verdict != 'never fits'

  assert seen(5)[0] < seen(20)[0] < seen(400)[0] and seen(400)[1]
  assert seen(300)[0] == pytest.approx(seen(400)[0], rel=1e-6)
  assert seen(500) == (pytest.approx(seen(400)[0]), False)


def test_limits_are_trusted_where_outputs_run_to_them():
  ample, tight = OutputLengths(20), OutputLengths(20)
  for i in range(2000):
    ample.add(30 + i % 41, 4096)
    tight.add(30 + i % 41, 30 + i % 41)
  assert ample.mean == pytest.approx(50, rel=0.02)
  assert ample.expected(4096) == pytest.approx(ample.mean, rel=0.05)
  assert ample.expected(10) < 10
  assert tight.expected(4096) > 1000
  assert tight.expected(30) == pytest.approx(30, rel=0.01)


def test_the_horizon_counts_who_decodes():
  horizon = DecodeHorizon()
  for name, first_s in (('a', 1.0), ('b', 2.0), ('c', 5.0)):
    horizon.expect(name, first_s)
  assert [horizon.decoding_at(t, 3.0) for t in (0.5, 1, 3, 4.5, 6)] == [
    0,
    1,
    2,
    1,
    1,
  ]
  horizon.expect('b', 4.0)
  assert horizon.decoding_at(6.0, 3.0) == 2
  horizon.remove('c')
  horizon.remove('c')
  assert horizon.decoding_at(6.0, 3.0) == 1
