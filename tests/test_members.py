# SPDX-License-Identifier: Apache-2.0
"""Instances that come, go and change while requests are served."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.request import Placement

PROMPT = np.random.default_rng(5).integers(2, 60, 41)
SPEC = replace(SPEC, lease_s=0.05)


@pytest.fixture
def cluster(make_cluster):
  return make_cluster(SPEC)


def submit(cluster, name, prefill='prefill0', decode='decode0', **plan):
  request = make_request(name, PROMPT, 8, arrival_s=cluster.backend.now_s())
  cluster.submit(request, Placement(name, 0, prefill, decode, **plan))


def run_out(cluster, until=lambda events: False):
  """Steps to the end, or until the events satisfy; they are checked."""
  events = []
  while not cluster.idle and not until(events):
    events += cluster.step(None)
    cluster.check()
  return events


def wait_for(cluster, wanted, events, limit_s=20.0):
  """Steps on from `events` until one of a class has come, idle or not."""
  until_s = cluster.backend.now_s() + limit_s
  while not any(isinstance(e, wanted) for e in events):
    assert cluster.backend.now_s() < until_s, wanted
    events += cluster.step(cluster.backend.now_s() + 0.1)
    cluster.check()
  return events


def ends(events):
  kinds = (Finished, Failed)
  return {e.request_id: type(e) for e in events if isinstance(e, kinds)}


@pytest.mark.parametrize('lost', ['prefill0', 'decode0'])
def test_who_needs_a_lost_instance_fails_and_nobody_else(cluster, lost):
  submit(cluster, 'a')
  submit(cluster, 'b', 'prefill1', 'decode1')
  cluster.lose(lost)
  events = run_out(cluster)
  assert ends(events) == {'a': Failed, 'b': Finished}
  (reason,) = [e.reason for e in events if isinstance(e, Failed)]
  assert reason == f'{lost} was lost'
  assert [e.instance for e in events if isinstance(e, InstanceLost)] == [lost]


def test_what_was_handed_over_does_not_need_its_prefill_instance(cluster):
  submit(cluster, 'a')
  events = run_out(
    cluster, lambda es: any(r.state == 'decoding' for r in runs_of(cluster))
  )
  cluster.lose('prefill0')
  assert ends(events + run_out(cluster)) == {'a': Finished}


def runs_of(cluster):
  return cluster._flow.runs.values()


def test_blocks_go_with_their_instance_and_none_is_read_there(cluster):
  submit(cluster, 'a')
  run_out(cluster)
  keys = set(cluster.inventory('prefill0'))
  assert keys
  cluster.lose('prefill0')
  submit(cluster, 'b', 'prefill1', fetch_blocks=5, fetch_from='prefill0')
  events = run_out(cluster)
  told = {k for e in events if isinstance(e, BlocksEvicted) for k in e.keys}
  assert told >= keys
  (fetched,) = [e for e in events if isinstance(e, PrefixFetched)]
  assert fetched.remote_tokens == 0 and ends(events) == {'b': Finished}
  assert 'prefill0' not in cluster.master.segments()


def test_a_lost_instance_comes_back_empty(cluster):
  submit(cluster, 'a')
  run_out(cluster)
  cluster.lose('prefill0')
  submit(cluster, 'refused')
  assert ends(run_out(cluster)) == {'refused': Failed}
  cluster.join('prefill0')
  assert cluster.inventory('prefill0') == ()
  submit(cluster, 'b')
  events = run_out(cluster)
  assert ends(events) == {'b': Finished}
  joined = [e for e in events if isinstance(e, InstanceJoined)]
  assert [(e.instance, e.role) for e in joined] == [('prefill0', 'prefill')]
  (fetched,) = [e for e in events if isinstance(e, PrefixFetched)]
  assert fetched.local_tokens == 0
  keys = make_request('b', PROMPT).block_keys
  assert len(keys) == 5 and {*keys} <= {*cluster.inventory('prefill0')}


def test_a_draining_instance_ends_its_runs_and_sends_hot_blocks_away(cluster):
  submit(cluster, 'a')
  run_out(cluster)
  submit(cluster, 'b', local_blocks=5)  # a hit: its blocks are hot
  cluster.drain('prefill0')
  submit(cluster, 'late')
  events = wait_for(cluster, InstanceLost, run_out(cluster))
  assert ends(events) == {'b': Finished, 'late': Failed}
  assert 'prefill0' not in cluster.master.segments()
  assert len(cluster.inventory('prefill1')) == 5
  submit(cluster, 'c', 'prefill1', local_blocks=5)
  (fetched,) = [e for e in run_out(cluster) if isinstance(e, PrefixFetched)]
  assert fetched.local_tokens == 40


def test_a_draining_decode_instance_ends_what_it_decodes(cluster):
  submit(cluster, 'a')
  run_out(cluster, lambda es: any(isinstance(e, PrefillDone) for e in es))
  cluster.drain('decode0')
  events = wait_for(cluster, InstanceLost, run_out(cluster))
  assert ends(events) == {'a': Finished}
  cluster.join('decode0')
  submit(cluster, 'b')
  assert ends(run_out(cluster)) == {'b': Finished}


def test_hot_blocks_are_replicated_and_dropped_on_demand(cluster):
  submit(cluster, 'a')
  run_out(cluster)
  keys = cluster.inventory('prefill0')
  cluster.replicate(keys[:3], 'prefill0', 'prefill1')
  events = run_out(cluster)
  stored = [e for e in events if isinstance(e, BlocksStored)]
  assert [(e.instance, e.keys) for e in stored] == [('prefill1', keys[:3])]
  cluster.drop(keys[:3], 'prefill0')
  wait_for(cluster, BlocksEvicted, [])
  assert set(cluster.inventory('prefill0')) == set(keys[3:])
  assert set(cluster.inventory('prefill1')) == set(keys[:3])


def test_an_absent_instance_serves_from_when_it_joins(make_cluster):
  cluster = make_cluster(replace(SPEC, absent=('prefill1', 'decode1')))
  conductor = make_conductor(cluster.spec, admission='none')
  assert 'prefill1' not in cluster.master.segments()
  assert not conductor.view.prefill.accepts_I.all()
  submit(cluster, 'early', 'prefill1')
  submit(cluster, 'a')
  assert ends(run_out(cluster)) == {'early': Failed, 'a': Finished}
  for name in ('prefill1', 'decode1'):
    cluster.join(name)
  submit(cluster, 'b', 'prefill1', 'decode1')
  events = run_out(cluster)
  assert ends(events) == {'b': Finished}
  assert [e.role for e in events if isinstance(e, InstanceJoined)] == [
    'prefill',
    'decode',
  ]
  for event in events:
    conductor.observe(event)
  assert conductor.view.prefill.accepts_I.all()
  assert conductor.view.decode.accepts_I.all()
  assert len(cluster.inventory('prefill1')) >= 5


def test_on_devices_only_what_is_made_for_both_roles_changes_its_own():
  cluster = make_device(SPEC)
  with pytest.raises(ValueError, match='ClusterSpec.switchable'):
    cluster.set_role('decode1', 'prefill')
  close(cluster)


def test_an_instance_changes_its_role(make_cluster):
  cluster = make_cluster(replace(SPEC, switchable=True))
  cluster.set_role('decode1', 'prefill')
  submit(cluster, 'a', 'decode1')
  events = run_out(cluster)
  assert ends(events) == {'a': Finished}
  assert [e.role for e in events if isinstance(e, InstanceJoined)] == [
    'prefill'
  ]
  assert len(cluster.inventory('decode1')) >= 5
  submit(cluster, 'b', 'prefill1')
  cluster.set_role('prefill1', 'decode')  # once it has ended that run
  events = wait_for(cluster, InstanceJoined, run_out(cluster))
  assert ends(events) == {'b': Finished}
  submit(cluster, 'c', 'decode1', 'prefill1', local_blocks=5)
  assert ends(run_out(cluster)) == {'c': Finished}
  cluster.lose('prefill1')
  with pytest.raises(ValueError, match='last of its role'):
    cluster.set_role('decode0', 'prefill')


def test_what_stays_on_a_device_is_gone_with_it():
  cluster = make_virtual(SPEC, device_cache_tokens=96)
  submit(cluster, 'a')
  run_out(cluster)
  submit(cluster, 'b', local_blocks=5)
  run_out(cluster, lambda es: any(isinstance(e, PrefixFetched) for e in es))
  cluster.lose('prefill0')  # while its pages are shared
  assert ends(run_out(cluster)) == {'b': Failed}
  cluster.join('prefill0')
  submit(cluster, 'c')
  assert ends(run_out(cluster)) == {'c': Finished}
  assert MODEL.num_layers == 3


def test_names_that_are_none_are_refused():
  cluster = make_virtual(SPEC)
  for verb in (cluster.lose, cluster.drain):
    with pytest.raises(ValueError, match="instance='nobody'"):
      verb('nobody')
  with pytest.raises(ValueError, match='is not gone'):
    cluster.join('prefill0')
  with pytest.raises(ValueError, match="segment='nowhere'"):
    cluster.replicate((), 'prefill0', 'nowhere')
