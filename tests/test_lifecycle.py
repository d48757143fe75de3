# SPDX-License-Identifier: Apache-2.0
"""The life of requests, in virtual time and on devices alike."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.request import Rejection
from mooncake_jax.serve import Decision
from mooncake_jax.serve import replay
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO


def _by_id(records):
  return {record.request_id: record for record in records}


def test_every_request_completes_and_everything_is_free_again(make_cluster):
  cluster = make_cluster()
  requests = shared_prefix_requests(12)
  records, _ = serve(requests, make_conductor(), cluster)
  assert [r.outcome for r in records] == ['completed'] * 12
  assert all(r.num_output_tokens == 5 for r in records)
  cluster.check()
  assert cluster.idle


def test_time_stamps_stand_in_life_order(make_cluster):
  records, _ = serve(
    shared_prefix_requests(6), make_conductor(), make_cluster()
  )
  for r in records:
    times = [
      r.arrival_s,
      r.placed_s,
      r.fetch_start_s,
      r.prefill_start_s,
      r.prefill_done_s,
      r.kv_arrived_s,
      r.finished_s,
    ]
    assert times == sorted(times), r
    assert r.first_token_s == r.prefill_done_s
    assert r.segments[-1].last_s == r.finished_s


def test_a_second_request_reuses_the_first_ones_prefix(make_cluster):
  requests = shared_prefix_requests(2, every_s=0.5)
  records, _ = serve(requests, make_conductor(), make_cluster())
  assert records[0].reused_tokens == {}
  assert records[1].reused_tokens == {'local_host': 24}


def test_a_full_prompt_hit_still_computes_the_tail(make_cluster):
  prompt = np.arange(24) + 2
  requests = [
    make_request('a', prompt),
    make_request('b', prompt, arrival_s=0.5),
  ]
  records, _ = serve(requests, make_conductor(), make_cluster())
  assert records[1].reused_tokens == {'local_host': 16}


def test_a_far_longer_prefix_is_fetched_and_replicated(make_cluster):
  """One holder is busy with a long queue, so the other fetches from it."""
  cluster = make_cluster()
  head = np.arange(40) % 50 + 2
  requests = [make_request('first', head)]
  requests += [
    make_request(f'r{i}', np.concatenate([head, [3 + i] * 40]), arrival_s=0.5)
    for i in range(8)
  ]
  records, _ = serve(requests, make_conductor(balancing_threshold=1.0), cluster)
  remote = [r for r in records if 'remote_host' in r.reused_tokens]
  assert remote and all(r.outcome == 'completed' for r in records)
  keys = requests[0].block_keys
  assert all(len(cluster.master.peek(key)) == 2 for key in keys)


def test_no_reuse_where_it_is_off(make_cluster):
  spec = replace(SPEC, reuse=False)
  records, _ = serve(
    shared_prefix_requests(4, every_s=0.5),
    make_conductor(spec),
    make_cluster(spec),
  )
  assert all(r.reused_tokens == {} for r in records)


@pytest.mark.parametrize('policy', list(POLICIES))
def test_every_policy_serves_all_under_tight_memory(make_cluster, policy):
  """Pools of one request each and a store of five blocks."""
  spec = replace(
    SPEC,
    prefill_pool_tokens=48,
    decode_pool_tokens=48,
    host_bytes=5 * 8 * 3 * 128,
  )
  cluster = make_cluster(spec)
  records, _ = serve(
    shared_prefix_requests(10), make_conductor(spec, policy=policy), cluster
  )
  assert [r.outcome for r in records] == ['completed'] * 10
  cluster.check()
  for name in spec.prefill_names:
    assert cluster.master.used_bytes(name) <= spec.host_bytes


def test_a_store_too_small_for_a_prompt_keeps_its_head(make_cluster):
  """Four blocks of room for prompts of seven with one head of three."""
  spec = replace(SPEC, host_bytes=4 * 8 * 3 * 128 + 2000, prefill_instances=1)
  records, _ = serve(
    shared_prefix_requests(4, suffix=36, every_s=0.2),
    make_conductor(spec),
    make_cluster(spec),
  )
  assert [r.reused_tokens.get('local_host') for r in records[1:]] == [24] * 3


def test_a_request_that_would_miss_its_slo_is_rejected(make_cluster):
  conductor = make_conductor(slo=SLO(ttft_s=0.02, tbt_s=10.0))
  cluster = make_cluster()
  records, _ = serve(shared_prefix_requests(12, suffix=60), conductor, cluster)
  outcomes = {r.outcome for r in records}
  assert outcomes == {'completed', 'rejected'}
  for record in records:
    assert record.predicted_ttft_s is not None
    assert (record.outcome == 'rejected') == (record.predicted_ttft_s > 0.02)
    assert record.outcome == 'completed' or record.reason == 'ttft'
  cluster.check()


def test_a_request_too_long_for_the_model_is_counted_and_the_rest_go_on(
  make_cluster,
):
  requests = [make_request('long', np.full(140, 3)), *shared_prefix_requests(2)]
  records = _by_id(serve(requests, make_conductor(), make_cluster())[0])
  assert records['long'].outcome == 'failed'
  assert 'num_prompt_tokens=140' in records['long'].reason
  assert records['r0'].outcome == records['r1'].outcome == 'completed'


def test_a_deadline_ends_a_request_that_waits_and_frees_it(make_cluster):
  """A time-out too short for any prefill."""
  spec = replace(SPEC, request_timeout_s=1e-5)
  cluster = make_cluster(spec)
  records, _ = serve(shared_prefix_requests(3), make_conductor(spec), cluster)
  assert {r.outcome for r in records} == {'failed'}
  assert all('deadline' in r.reason for r in records)
  cluster.check()
  assert cluster.idle


@pytest.mark.parametrize('nth', range(1, 12))
def test_a_cancelled_request_frees_everything(make_cluster, nth):
  """Cancelled at its nth event, so in every state it goes through."""
  cluster, conductor = make_cluster(), make_conductor()
  seen = []

  def cancel(event):
    if getattr(event, 'request_id', None) == 'r1':
      seen.append(event)
      if len(seen) == nth:
        cluster.cancel('r1')

  requests = shared_prefix_requests(4, output=20)
  records = _by_id(serve(requests, conductor, cluster, on_event=cancel)[0])
  assert records['r1'].outcome in ('cancelled', 'completed')
  assert all(records[r].outcome == 'completed' for r in ('r0', 'r2', 'r3'))
  cluster.check()
  assert cluster.idle


def test_a_session_goes_on_with_its_next_turn(make_cluster):
  def follow_up(record):
    turn = int(record.request_id[1:])
    if turn == 3:
      return None
    prompt = np.full(20 * (turn + 2), 7)
    return make_request(
      f't{turn + 1}', prompt, arrival_s=record.finished_s + 0.1
    )

  records, _ = serve(
    [make_request('t0', np.full(20, 7))],
    make_conductor(),
    make_cluster(),
    follow_up=follow_up,
  )
  assert [r.request_id for r in records] == ['t0', 't1', 't2', 't3']
  assert records[3].reused_tokens == {'local_host': 56}


def test_recorded_events_replay_to_the_same_placements(make_cluster):
  requests = shared_prefix_requests(20, every_s=0.001)
  conductor = make_conductor(slo=SLO(0.008, 10.0))
  _, journal = serve(requests, conductor, make_cluster())
  made = [e.decision for e in journal if isinstance(e, Decision)]
  assert any(isinstance(d, Rejection) for d in made)
  again = make_conductor(slo=SLO(0.008, 10.0))
  assert replay(journal, requests, again) == made


@pytest.mark.parametrize('policy', ['random', 'kvcache_centric', 'cost_based'])
def test_simulator_and_engine_place_alike(policy):
  """Requests far enough apart that no wall clock decides anything."""
  requests = shared_prefix_requests(6, every_s=0.3)
  plans = []
  for make in (make_virtual, make_device):
    cluster = make(SPEC)
    _, journal = serve(requests, make_conductor(policy=policy), cluster)
    plans.append([e.decision for e in journal if isinstance(e, Decision)])
    if make is make_device:
      close(cluster)
  assert plans[0] == plans[1]


def test_an_empty_prompt_is_named():
  with pytest.raises(ValueError, match="request 'x': num_prompt_tokens=0"):
    make_request('x', [])


def test_the_simulator_repeats_itself_to_the_bit():
  runs = [
    serve(
      shared_prefix_requests(30, every_s=0.002),
      make_conductor(),
      make_virtual(),
    )
    for _ in range(2)
  ]
  assert runs[0] == runs[1]


def test_a_simulated_lone_request_takes_what_the_costs_say():
  from lifecycle import COSTS

  request = make_request('x', np.arange(30) + 2, output=4)
  records, _ = serve([request], make_conductor(), make_virtual())
  assert records[0].ttft_s == pytest.approx(COSTS.prompt_s(30, 0, 12))
  assert records[0].segments[1].count == 3
  assert MODEL.num_layers == 3
