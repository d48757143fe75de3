# SPDX-License-Identifier: Apache-2.0
"""Copies of hot prefixes and changes of roles, as the Conductor advises."""

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
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.advice import DropCopies
from mooncake_jax.conductor.advice import Replicate
from mooncake_jax.conductor.advice import SetRole
from mooncake_jax.conductor.heat import Replication
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Failed
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.request import Placement
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend


def ask(name, length=30, output=5, arrival_s=0.0, **kwargs):
  prompt = np.full(length, 2 + zlib.crc32(name.encode()) % 40)
  return make_request(name, prompt, output, arrival_s, **kwargs)


def simulated(spec=SPEC, costs=COSTS, recheck=None, **kwargs) -> Cluster:
  return Cluster(spec, MODEL, VirtualBackend(costs, LAYERS, **kwargs), recheck)


def test_hot_prefixes_are_copied_within_budget_and_cooled_again():
  spec = replace(SPEC, prefill_instances=3)
  block_bytes = spec.layout(MODEL).block_bytes
  rules = Replication(
    hot_per_s=0.5,
    cool_per_s=0.1,
    half_life_s=10.0,
    copy_bytes_per_s=block_bytes,
    burst_s=5.0,
    min_blocks=2,
  )
  conductor = make_conductor(spec, replication=rules, policy='cache_aware')
  head = ask('a', 41)
  conductor.observe(BlocksStored(0.0, 'prefill0', head.block_keys))
  advice, moved_s = [], []
  for i in range(30):
    now_s = float(i)
    conductor.place(replace(head, request_id=f'r{i}'), now_s)
    for each in conductor.advise(now_s):
      advice.append(each)
      moved_s.append(now_s)
      if isinstance(each, Replicate):
        conductor.observe(BlocksStored(now_s, each.target, each.keys))
  assert advice and all(isinstance(a, Replicate) for a in advice)
  assert {a.target for a in advice} <= {'prefill1', 'prefill2'}
  assert moved_s[0] >= 4.0  # four blocks had to be saved up for
  cooled = conductor.advise(400.0)
  assert [type(a) for a in cooled] == [DropCopies] * len(advice)
  assert conductor.advise(401.0) == []


def test_a_hot_prefix_lies_where_nobody_fetched_it():
  """The loop carries advice out: a copy at an instance that never prefilled."""
  rules = Replication(hot_per_s=0.2, cool_per_s=0.01, half_life_s=5.0)
  conductor = make_conductor(policy='cache_aware', replication=rules)
  cluster = simulated()
  requests = [
    replace(ask('a', 41), request_id=f'r{i}', arrival_s=0.5 * i)
    for i in range(20)
  ]
  records, _ = serve(requests, conductor, cluster)
  # cache_aware never fetches, so the second instance got its copy by advice.
  assert {r.prefill for r in records} == set(SPEC.prefill_names)
  assert all(r.reused_tokens == {'local_host': 40} for r in records[1:])


def test_a_copy_that_went_with_its_instance_is_made_again():
  rules = Replication(hot_per_s=0.2, cool_per_s=0.01, half_life_s=5.0)
  conductor = make_conductor(policy='cache_aware', replication=rules)
  head = ask('a', 41)
  conductor.observe(BlocksStored(0.0, 'prefill0', head.block_keys))
  copied: list[tuple[int, str]] = []
  for i in range(30):
    now_s = float(i)
    if i == 10:
      conductor.observe(InstanceLost(now_s, 'prefill1'))
    if i == 20:
      conductor.observe(InstanceJoined(now_s, 'prefill1', 'prefill'))
    conductor.place(replace(head, request_id=f'r{i}'), now_s)
    advice = conductor.advise(now_s)
    copied += [(i // 10, a.target) for a in advice if isinstance(a, Replicate)]
  assert copied == [(0, 'prefill1'), (2, 'prefill1')]


def test_a_copy_that_was_not_made_is_paid_back_and_made_again():
  """Of 5 blocks 2 came; a budget of 8 that fills up slowly pays for it."""
  block_bytes = SPEC.layout(MODEL).block_bytes
  rules = Replication(
    hot_per_s=0.2,
    cool_per_s=0.01,
    half_life_s=5.0,
    copy_bytes_per_s=block_bytes / 10,
    burst_s=80.0,
    copy_timeout_s=20.0,
  )
  conductor = make_conductor(policy='cache_aware', replication=rules)
  heat, head = conductor._adviser._heat, ask('a', 41)
  assert heat is not None
  conductor.observe(BlocksStored(0.0, 'prefill0', head.block_keys))
  advised, saved = [], []
  for i in range(72, 110):
    now_s = float(i)
    for j in range(3):
      conductor.place(replace(head, request_id=f'r{i}.{j}'), now_s)
    if any(isinstance(a, Replicate) for a in conductor.advise(now_s)):
      advised.append(now_s)
      conductor.observe(BlocksStored(now_s, 'prefill1', head.block_keys[:2]))
    saved.append(heat._budget_bytes / block_bytes)
  assert advised[1] - advised[0] == 21.0
  first, second = (int(s - 72) for s in advised)
  assert saved[first] == pytest.approx(advised[0] / 10 - 5)
  assert saved[second] == pytest.approx(saved[first] + 2.1 + 3 - 5)
  assert len(advised) == 2


def test_a_hot_prefix_on_an_ssd_alone_is_copied_from_there():
  block_bytes = SPEC.layout(MODEL).block_bytes
  cluster = simulated(
    replace(SPEC, ssd_bytes=64 * block_bytes, host_bytes=6 * block_bytes)
  )
  heads = [ask(name, 41) for name in ('a', 'b', 'c')]
  for head in heads:
    placement = Placement(head.request_id, 0, 'prefill0', 'decode0')
    cluster.submit(head, placement)
    while not cluster.idle:
      cluster.step(None)
  keys = heads[0].block_keys
  below = [k for k in keys if k not in cluster.inventory('prefill0')]
  assert below and {*below} <= {*cluster.inventory('prefill0/ssd')}
  cluster.replicate(keys, 'prefill0', 'prefill1')
  while not cluster.idle:
    cluster.step(None)
  assert {*cluster.inventory('prefill1')} == {*keys}


def test_roles_change_with_hysteresis():
  spec = replace(SPEC, prefill_instances=2, decode_instances=4)
  rules = RoleRules(hold_s=10.0, rest_s=60.0, average_s=20.0)
  conductor = make_conductor(
    spec,
    roles=rules,
    admission='none',
    policy='load_balancing',
    prior_output_tokens=1,
  )
  changes = []
  for i in range(400):
    now_s = 0.25 * i
    conductor.view.decode.left_tokens_I[:] = 0
    placed = conductor.place(ask(f'r{i}', 120, 1), now_s)
    assert isinstance(placed, Placement)
    conductor.observe(Failed(now_s, f'r{i}', 0, placed.prefill))
    conductor._adviser._roles.placed(0.4, 0.2, now_s)  # pyright: ignore
    changes += [(now_s, a) for a in conductor.advise(now_s)]
  assert all(isinstance(a, SetRole) and a.role == 'prefill' for _, a in changes)
  times_s = [t for t, _ in changes]
  assert times_s and times_s[0] >= 10.0
  assert all(b - a >= 60.0 for a, b in itertools.pairwise(times_s))


def test_balanced_pools_are_left_alone():
  conductor = make_conductor(roles=RoleRules(hold_s=1.0))
  roles = conductor._adviser._roles
  assert roles is not None
  for i in range(300):
    roles.placed(1.0, 1.0, float(i))
    assert conductor.advise(float(i)) == []
