# SPDX-License-Identifier: Apache-2.0
"""Decode pools that are too small for all outputs, on both backends."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import Placement
from mooncake_jax.request import Sampling
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO

# Rows that grow to 60 tokens, room for 96; the model takes no more than that.
TIGHT = replace(
  SPEC,
  prefill_instances=1,
  decode_instances=1,
  decode_pool_tokens=96,
  decode_reserve='prompt',
)
ROOMY = replace(TIGHT, decode_pool_tokens=512, decode_reserve='all')


def sampled(requests):
  """Every second one draws, each with a seed of its own."""
  return [
    replace(r, sampling=Sampling(0.9, 20, 0.95, seed=i)) if i % 2 else r
    for i, r in enumerate(requests)
  ]


def served(cluster, requests, spec=TIGHT):
  """Records and events; the cluster is checked at each."""
  events = []

  def hear(event):
    events.append(event)
    cluster.check()

  records, _ = serve(requests, make_conductor(spec), cluster, on_event=hear)
  assert cluster.idle
  return records, events


def preemptions(events):
  return [e for e in events if isinstance(e, Preempted)]


@pytest.mark.parametrize(
  'changes', [{}, {'reuse': False}, {'host_bytes': 9999}]
)
def test_preempted_requests_put_out_the_same_tokens(make_cluster, changes):
  """From the store, with no store, and from one that loses most of it."""
  requests = sampled(shared_prefix_requests(6, 16, 5, output=40))
  tokens = []
  for spec in (ROOMY, replace(TIGHT, **changes)):
    records, events = served(make_cluster(spec), requests, spec)
    assert [r.outcome for r in records] == ['completed'] * 6
    assert [r.num_output_tokens for r in records] == [40] * 6
    tokens.append([r.output_tokens for r in records])
  assert tokens[0] == tokens[1]
  preempted = preemptions(events)
  assert preempted
  assert sum(r.preemptions for r in records) == len(preempted)
  for record in records:
    assert (record.preempted_s > 0) == (record.preemptions > 0)
  summary = summarize(records, SLO(1.0, 1.0))
  assert summary.preemptions == len(preempted)
  assert summary.recomputed_tokens == sum(r.recomputed_tokens for r in records)
  ends = [e for e in events if isinstance(e, Finished)]
  assert [e.num_output_tokens for e in ends] == [40] * 6


def test_what_the_store_has_is_not_computed_again(make_cluster):
  """Of a context of n tokens, at most what is behind the last whole block."""
  requests = shared_prefix_requests(6, 16, 5, output=40)
  records, events = served(make_cluster(TIGHT), requests)
  count = sum(r.preemptions for r in records)
  recomputed = sum(r.recomputed_tokens for r in records)
  assert 0 < recomputed <= count * SPEC.block_size_tokens
  puts = [e for e in events if isinstance(e, WorkDone)]
  assert any(e.step == 'put_output' for e in puts)


def test_the_first_life_stands_in_the_record(make_cluster):
  requests = shared_prefix_requests(6, 16, 5, output=40)
  records, events = served(make_cluster(TIGHT), requests)
  for record in records:
    first = next(
      e
      for e in events
      if isinstance(e, KVArrived) and e.request_id == record.request_id
    )
    assert record.kv_arrived_s == first.time_s
    assert sum(record.reused_tokens.values()) <= record.prompt_tokens
    times = [s.first_s for s in record.segments]
    assert times == sorted(times)


def test_the_youngest_is_preempted_and_the_oldest_never():
  requests = [
    make_request(f'r{i}', np.arange(20) + i, 40, arrival_s=1e-4 * i)
    for i in range(5)
  ]
  records, events = served(make_virtual(TIGHT), requests)
  batch = {}
  for event in events:
    match event:
      case KVArrived():
        batch[event.request_id] = event
      case Preempted():
        assert event.request_id == max(batch), batch
        del batch[event.request_id]
      case Finished():
        del batch[event.request_id]
  assert records[0].preemptions == 0
  assert preemptions(events)


def test_reserving_all_preempts_nobody():
  spec = replace(TIGHT, decode_reserve='all')
  requests = shared_prefix_requests(6, 16, 5, output=40)
  assert not preemptions(served(make_virtual(spec), requests, spec)[1])


def under_pressure(cluster, count=5, output=40):
  """Submits requests that can't all stay, and steps to the first Preempted.

  Returns:
    Its request and the events so far.
  """
  for i in range(count):
    now_s = cluster.backend.now_s()
    request = make_request(f'r{i}', np.arange(20) + i, output, now_s + 1e-6 * i)
    cluster.submit(request, Placement(f'r{i}', 0, 'prefill0', 'decode0'))
  events = []
  while not preemptions(events):
    events += cluster.step(None)
    cluster.check()
  return preemptions(events)[0].request_id, events


def run_out(cluster):
  events = []
  while not cluster.idle:
    events += cluster.step(None)
    cluster.check()
  return events


def state_of(cluster, name):
  return cluster._flow.runs[name, 0].state


SLOW_PUT = 0.05


def slow_store(put_s: float = SLOW_PUT):
  """Puts to others' hosts take long: whoever is preempted stays so."""
  from lifecycle import COSTS

  return replace(COSTS, copy_latency_s=put_s)


def test_a_preempted_request_keeps_its_pages_until_they_are_read():
  cluster = make_virtual(TIGHT, slow_store())
  name, _ = under_pressure(cluster)
  run = cluster._flow.runs[name, 0]
  assert run.state == 'preempted' and run.decode_pages
  pages, start_s = {*run.decode_pages}, cluster.backend.now_s()
  while run.decode_pages:
    others = [r for r in cluster._flow.runs.values() if r is not run]
    assert not pages & {page for r in others for page in r.decode_pages}
    cluster.step(None)
    cluster.check()
  assert cluster.backend.now_s() - start_s >= SLOW_PUT
  assert {e.request_id for e in run_out(cluster) if isinstance(e, Finished)} > {
    name
  }


def test_a_preempted_request_is_cancelled_while_its_blocks_are_written():
  cluster = make_virtual(TIGHT, slow_store())
  name, _ = under_pressure(cluster)
  assert state_of(cluster, name) == 'preempted'
  stored = {*cluster.inventory('prefill0')}
  cluster.cancel(name)
  ends = [e for e in run_out(cluster) if isinstance(e, (Finished, Failed))]
  assert name not in {e.request_id for e in ends} and len(ends) == 4
  assert stored <= {*cluster.inventory('prefill0')}


def test_a_preempted_request_has_a_deadline():
  spec = replace(TIGHT, request_timeout_s=0.15)
  cluster = make_virtual(spec, slow_store(9.0))
  name, _ = under_pressure(cluster)
  failed = [e for e in run_out(cluster) if isinstance(e, Failed)]
  (event,) = [e for e in failed if e.request_id == name]
  assert event.reason == 'deadline while preempted: request_timeout_s=0.15'
  arrival_s = 1e-6 * int(name[1:])
  assert event.time_s == pytest.approx(arrival_s + 0.15)


@pytest.mark.parametrize('lost', ['prefill0', 'decode0'])
def test_losing_either_instance_ends_a_preempted_request(lost):
  cluster = make_virtual(TIGHT, slow_store())
  name, _ = under_pressure(cluster)
  cluster.lose(lost)
  failed = [e for e in run_out(cluster) if isinstance(e, Failed)]
  (event,) = [e for e in failed if e.request_id == name]
  assert event.retryable and event.reason == f'{lost} was lost'


def test_whose_prefill_instance_is_gone_is_placed_anew_not_preempted():
  spec = replace(TIGHT, prefill_instances=2)
  cluster = make_virtual(spec)
  for i in range(3):
    request = make_request(f'r{i}', np.arange(20) + i, 40, 1e-6 * i)
    prefill = f'prefill{i // 2}'
    cluster.submit(request, Placement(f'r{i}', 0, prefill, 'decode0'))
  events = []
  while not any(
    isinstance(e, KVArrived) and e.request_id == 'r2' for e in events
  ):
    events += cluster.step(None)
  cluster.lose('prefill1')
  events += run_out(cluster)
  reasons = {e.request_id: e for e in events if isinstance(e, Failed)}
  assert reasons.keys() == {'r2'}
  assert reasons['r2'].reason == 'preempted, and prefill1 was lost'
  assert reasons['r2'].retryable and reasons['r2'].instance == 'prefill1'
  done = {e.request_id for e in events if isinstance(e, Finished)}
  assert done == {'r0', 'r1'}


def test_a_draining_instance_ends_what_was_preempted_there():
  cluster = make_virtual(replace(TIGHT, prefill_instances=2), slow_store())
  name, _ = under_pressure(cluster)
  cluster.drain('prefill0')
  done = {e.request_id for e in run_out(cluster) if isinstance(e, Finished)}
  assert name in done


def test_a_put_that_fails_is_made_good_by_computing(make_cluster):
  """The segment is lost while the preempted one waits."""
  cluster = make_cluster(TIGHT)
  name, events = under_pressure(cluster)
  cluster.lose_segment('prefill0')
  events += run_out(cluster)
  fetched = [
    e for e in events if isinstance(e, PrefixFetched) and e.request_id == name
  ]
  assert len(fetched) > 1
  done = [e for e in events if isinstance(e, Finished)]
  assert len(done) == 5
  emitted = sum(
    e.emitted.segment.count
    for e in events
    if isinstance(e, TokensEmitted) and (name, 0) in e.emitted.tries
  )
  assert emitted == 40


def test_the_youngest_makes_way_for_an_older_one_that_waits_for_its_row():
  """It has the batch's only row and no page; the other has the pages."""
  spec = replace(TIGHT, prefill_instances=2, decode_pool_tokens=64, max_batch=1)
  cluster = make_virtual(spec)
  for name, prompt, output, prefill in (
    ('a', np.arange(40), 20, 'prefill0'),
    ('b', np.arange(8), 30, 'prefill1'),
  ):
    request = make_request(name, prompt, output, 1e-6 * (name == 'b'))
    cluster.submit(request, Placement(name, 0, prefill, 'decode0'))
  events = run_out(cluster)
  assert [e.request_id for e in preemptions(events)] == ['b']
  ends = [e.request_id for e in events if isinstance(e, Finished)]
  assert ends == ['a', 'b']


@pytest.mark.parametrize('nth', [1, 2])
def test_a_cancel_right_after_a_preemption(make_cluster, nth):
  """The nth preempted goes; all others put out what they would alone."""
  requests = shared_prefix_requests(6, 16, 5, output=40)
  cluster, gone = make_cluster(TIGHT), []

  def cancel(event):
    cluster.check()
    if isinstance(event, Preempted):
      gone.append(event.request_id)
      if len(gone) == nth:
        cluster.cancel(event.request_id)

  conductor = make_conductor(TIGHT)
  records, _ = serve(requests, conductor, cluster, on_event=cancel)
  outcomes = {r.request_id: r.outcome for r in records}
  assert outcomes.pop(gone[nth - 1]) == 'cancelled'
  assert set(outcomes.values()) == {'completed'}
  assert cluster.idle
  conductor.view.check()
  assert not len(conductor.view.placed)
