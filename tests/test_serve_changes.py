# SPDX-License-Identifier: Apache-2.0
"""Instances that go and change, and copies, while `serve` goes on."""

from dataclasses import replace
from itertools import pairwise

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
from mooncake_jax.conductor.heat import Replication
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceDraining
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import TokensEmitted
from mooncake_jax.serve import serve


def disturbed(cluster, requests, verb, name, after, conductor=None):
  """Serves, and calls a verb of the cluster at the n-th event of a kind."""
  kind, count = after
  seen, events = [], []

  def on_event(event):
    events.append(event)
    if isinstance(event, kind) and getattr(event, 'instance', name) == name:
      seen.append(event)
      if len(seen) == count:
        getattr(cluster, verb)(name)

  conductor = conductor or make_conductor(admission='none')
  records, _ = serve(requests, conductor, cluster, on_event=on_event)
  assert len(seen) >= count, 'nothing was disturbed'
  cluster.check()
  conductor.view.check()
  if not conductor.spec.telemetry.loss:
    assert not len(conductor.view.placed)
  return records, events


def check_once(records, requests):
  """Each request counts once, with all its tokens, in order."""
  assert [r.request_id for r in records] == [r.request_id for r in requests]
  for record, request in zip(records, requests):
    assert record.outcome == 'completed', record
    assert record.num_output_tokens == request.max_output_tokens
    ends_s = [s.last_s for s in record.segments]
    assert all(a <= b for a, b in pairwise(ends_s))


def tried(records, name):
  """Of the requests that were tried again, where they ended."""
  again = [r for r in records if r.attempt]
  assert again, 'nobody was hit'
  assert all(name not in (r.prefill, r.decode) for r in again)


@pytest.mark.parametrize(
  'name, after',
  [
    ('prefill1', (PrefillDone, 3)),
    ('decode1', (TokensEmitted, 4)),
  ],
)
def test_what_was_on_a_lost_instance_is_served_elsewhere(name, after):
  requests = shared_prefix_requests(40, output=12, every_s=0.002)
  records, events = disturbed(make_virtual(), requests, 'lose', name, after)
  check_once(records, requests)
  tried(records, name)
  failed = {
    (e.request_id, e.attempt): i
    for i, e in enumerate(events)
    if isinstance(e, Failed)
  }
  assert all(e.retryable for e in events if isinstance(e, Failed))
  # What works of the old try still end is told to nobody as its doing.
  for i, event in enumerate(events):
    if isinstance(event, PrefillDone | Finished):
      assert i < failed.get((event.request_id, event.attempt), len(events))
    elif isinstance(event, TokensEmitted):
      ends = [failed.get(key, len(events)) for key in event.emitted.tries]
      assert i < min(ends)


def test_tokens_are_those_of_an_undisturbed_run():
  """On devices: also of who had got some tokens already."""
  requests = shared_prefix_requests(6, output=8)
  served = []
  for lost in (False, True):
    cluster = make_device()
    try:
      if lost:
        at = (TokensEmitted, 2)
        records, _ = disturbed(cluster, requests, 'lose', 'decode0', at)
        tried(records, 'decode0')
      else:
        records, _ = serve(requests, make_conductor(admission='none'), cluster)
    finally:
      close(cluster)
    check_once(records, requests)
    served.append([r.output_tokens for r in records])
  assert served[0] == served[1]


@pytest.mark.parametrize(
  'name, other', [('prefill1', 'prefill0'), ('decode0', 'decode1')]
)
@pytest.mark.parametrize(
  'make, every_s', [(make_virtual, 0.002), (make_device, 0.1)]
)
def test_an_instance_drains_and_costs_nobody_a_try(make, every_s, name, other):
  """Nobody is placed there from the drain on, though most telemetry is lost."""
  requests = shared_prefix_requests(30, output=12, every_s=every_s)
  cluster = make()
  conductor = make_conductor(
    policy='random', admission='none', telemetry=Telemetry(loss=0.9)
  )
  after = (PrefillDone if name == 'prefill1' else TokensEmitted, 1)
  try:
    records, events = disturbed(
      cluster, requests, 'drain', name, after, conductor
    )
  finally:
    if make is make_device:
      close(cluster)
  check_once(records, requests)
  assert not any(r.attempt for r in records)
  (drain,) = [e for e in events if isinstance(e, InstanceDraining)]
  assert [e.instance for e in events if isinstance(e, InstanceLost)] == [name]
  later = [r for r in records if (r.placed_s or 0.0) > drain.time_s]
  role = 'prefill' if name in SPEC.prefill_names else 'decode'
  assert later and {getattr(r, role) for r in later} == {other}


def long_prompts(count, every_s, start=0, start_s=0.0):
  rng = np.random.default_rng(start)
  return [
    make_request(
      f'r{start + i}', rng.integers(2, 60, 100), 2, start_s + every_s * i
    )
    for i in range(count)
  ]


ROLES = RoleRules(hold_s=0.2, rest_s=1.0, average_s=0.5)


def joined(spec, requests):
  """Roles that instances took in a run, which cost nobody a try."""
  cluster = make_virtual(spec)
  conductor = make_conductor(
    spec,
    policy='cost_based',
    admission='none',
    roles=ROLES,
    prior_output_tokens=requests[0].max_output_tokens,
  )
  events = []
  records, _ = serve(requests, conductor, cluster, on_event=events.append)
  check_once(records, requests)
  assert not any(r.attempt for r in records)
  cluster.check()
  return [e for e in events if isinstance(e, InstanceJoined)]


def test_a_steady_load_that_is_balanced_changes_no_role():
  spec = replace(SPEC, prefill_instances=2, decode_instances=2)
  requests = shared_prefix_requests(400, output=10, every_s=0.01)
  assert joined(spec, requests) == []


def test_a_load_that_shifts_for_good_changes_one_role():
  """Idle decode instances are two; one goes to prefill and stays there."""
  spec = replace(SPEC, prefill_instances=2, decode_instances=2)
  light = shared_prefix_requests(200, output=10, every_s=0.01)
  heavy = long_prompts(500, 0.009, 200, 2.0)
  changes = joined(spec, light + heavy)
  assert [e.role for e in changes] == ['prefill']
  assert changes[0].instance.startswith('decode')
  assert changes[0].time_s > 2.0


def test_copies_ahead_stay_within_their_bytes_and_go_when_they_cool():
  spec = replace(SPEC, prefill_instances=3, lease_s=0.1)
  block_bytes = spec.layout(MODEL).block_bytes
  rules = Replication(
    hot_per_s=2.0,
    cool_per_s=0.5,
    half_life_s=1.0,
    copy_bytes_per_s=2 * block_bytes,
    burst_s=4.0,
    min_blocks=2,
  )
  hot = shared_prefix_requests(40, every_s=0.05)
  rest = long_prompts(40, 0.5, 100, 2.0)
  conductor = make_conductor(
    spec, policy='cache_aware', admission='none', replication=rules
  )
  cluster, told = make_virtual(spec), []
  records, _ = serve(hot + rest, conductor, cluster, on_event=told.append)
  check_once(records, hot + rest)
  keys = set(hot[0].block_keys[:3])
  copies = [
    (e.time_s, e.instance, len(keys & {*e.keys}))
    for e in told
    if isinstance(e, BlocksStored) and keys & {*e.keys}
  ]
  cooled = [
    e for e in told if isinstance(e, BlocksEvicted) and keys & {*e.keys}
  ]
  assert len({name for _, name, _ in copies}) > 1 and cooled
  for end_s, _, _ in copies:
    blocks = sum(n for at_s, _, n in copies[1:] if at_s <= end_s)
    assert blocks <= 2 * (end_s + 4.0)
  holders = [n for n in spec.prefill_names if keys <= {*cluster.inventory(n)}]
  assert len(holders) == 1


def test_what_was_not_heard_of_is_put_right_by_an_inventory():
  """One event is lost; the segment's later ones don't wait for it for ever."""
  one = replace(SPEC, prefill_instances=1)
  cluster, conductor = make_virtual(one), make_conductor(one)
  lost, hear = [], conductor.observe

  def hear_but_one(event):
    if isinstance(event, BlocksStored) and not lost:
      lost.append(event)
    else:
      hear(event)

  conductor.observe = hear_but_one
  serve(shared_prefix_requests(16, every_s=1.0), conductor, cluster)
  (missed,) = lost
  index = conductor.view.index
  assert {*missed.keys} <= {*index.inventory(missed.instance)}
  assert {*index.inventory('prefill0')} == {*cluster.inventory('prefill0')}
