# SPDX-License-Identifier: Apache-2.0
"""Instances of different speed: believed to be so, and truly so."""

from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import LOOSE
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC as SMALL
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import InstanceSizes
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefixFetched
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.request import Placement
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO
from scripts.config import load
from scripts.experiment import Experiment
from tiny_experiment import tiny

SPEC = replace(SMALL, prefill_instances=3, prefill_pool_tokens=512)
FAST = replace(
  COSTS,
  prefill_base_s=COSTS.prefill_base_s / 3,
  prefill_s_per_prefix_token=COSTS.prefill_s_per_prefix_token / 3,
  prefill_s_per_token=COSTS.prefill_s_per_token / 3,
  prefill_s_per_token_squared=COSTS.prefill_s_per_token_squared / 3,
)
SLOW_LINK = replace(COSTS, copy_bytes_per_s=COSTS.copy_bytes_per_s / 10)
# One computes three times as fast, one is ten times slower to read from.
TRUTH = {'prefill1': FAST, 'prefill2': SLOW_LINK}


def served(every_s, believed, policy='cost_based', count=90):
  rng = np.random.default_rng(3)
  heads = rng.integers(2, 60, (4, 48))
  requests = [
    make_request(
      f'r{i}',
      np.concatenate([heads[i % 4], rng.integers(2, 60, 20 + i % 13)]),
      3,
      every_s * i,
    )
    for i in range(count)
  ]
  rules = ConductorSpec(policy=policy, admission='none', correct=False)
  conductor = Conductor(
    rules,
    SPEC,
    MODEL,
    COSTS,
    LOOSE,
    {name: belief_of(SPEC, MODEL, costs) for name, costs in believed.items()},
  )
  backend = VirtualBackend(COSTS, LAYERS, instances=TRUTH)
  records, _ = serve(requests, conductor, Cluster(SPEC, MODEL, backend))
  assert [r.outcome for r in records] == ['completed'] * count
  return records, summarize(records, LOOSE)


@pytest.mark.parametrize('policy', ['cost_based', 'random'])
def test_true_beliefs_predict_spaced_requests(policy):
  """Wherever they go, with whatever prefix, local or fetched."""
  records, summary = served(0.2, TRUTH, policy)
  if policy == 'random':
    assert len({r.prefill for r in records}) == 3
  errors = summary.prediction_errors
  for term in ('queue', 'transfer', 'prefill', 'ttft'):
    assert errors[term]['p99_s'] == pytest.approx(0.0, abs=1e-9), term


def test_false_beliefs_do_not():
  _, summary = served(0.2, {}, 'random')
  assert summary.prediction_errors['prefill']['p99_s'] > 1e-3


def test_the_fast_one_is_given_more_and_all_are_served_sooner():
  """At a load that the slow ones alone could not carry."""
  records, knowing = served(0.002, TRUTH)
  _, ignorant = served(0.002, {})
  at = [r.prefill for r in records]
  others = max(at.count('prefill0'), at.count('prefill2'))
  assert at.count('prefill1') > 1.5 * others > 0
  assert (knowing.ttft_s['mean'] or 0) < 0.8 * (ignorant.ttft_s['mean'] or 0)


BLOCK_BYTES = SMALL.layout(MODEL).block_bytes
SIZES = {
  'prefill1': InstanceSizes(host_bytes=3 * BLOCK_BYTES),
  'decode0': InstanceSizes(decode_pool_tokens=96, max_batch=3),
}


def test_a_small_instance_keeps_and_decodes_less():
  """Of 5 blocks 3; of 3 requests of 44 tokens, 2 at a time."""
  spec = replace(SMALL, instances=SIZES)
  cluster = Cluster(spec, MODEL, VirtualBackend(COSTS, LAYERS))
  assert cluster.max_tokens == 96
  for name, place in (('a', 'prefill0'), ('b', 'prefill1')):
    cluster.submit(
      make_request(name, np.full(41, ord(name) % 60), 4),
      Placement(name, 0, place, 'decode1'),
    )
  drain(cluster)
  assert len(cluster.inventory('prefill0')) == 5
  assert len(cluster.inventory('prefill1')) == 3
  for decode, waits in (('decode1', False), ('decode0', True)):
    for i in range(3):
      name = f'{decode}.{i}'
      cluster.submit(
        make_request(
          name, np.full(41, 2 + i), 4, arrival_s=cluster.backend.now_s()
        ),
        Placement(name, 0, 'prefill0', decode),
      )
    events = drain(cluster)
    done_s = min(e.time_s for e in events if isinstance(e, Finished))
    last_s = max(e.started_s for e in events if isinstance(e, PrefixFetched))
    assert (last_s >= done_s) == waits


def drain(cluster):
  events = []
  while not cluster.idle:
    events += cluster.step(None)
    cluster.check()
  return events


def test_the_conductor_counts_on_the_sizes_there_are():
  spec = replace(SMALL, instances=SIZES)
  rules = ConductorSpec(admission='none', policy='random')
  conductor = Conductor(rules, spec, MODEL, COSTS, LOOSE)
  loads = conductor.view.decode
  assert loads.capacity_tokens_I.tolist() == [96, 512]
  assert loads.max_batch_I.tolist() == [3, SMALL.max_batch]
  requests = [make_request(f'r{i}', np.full(41, 2 + i), 4) for i in range(6)]
  placed = [conductor.place(request, 0.0) for request in requests]
  at = [p.decode for p in placed if isinstance(p, Placement)]
  assert at.count('decode0') == 2 and at.count('decode1') == 4


def test_each_decode_instance_is_checked_by_its_own_batch_and_speed():
  """Ten rows of which three are in a step, and a step that is slower."""
  slow = replace(COSTS, decode_base_s=10 * COSTS.decode_base_s)
  spec = replace(SMALL, instances=SIZES)
  # Of 20 tokens the longest two intervals count; the first is half a step more.
  slo = SLO(9.0, 1.25 * COSTS.decode_step_s(3, 120))
  asked = make_request('r', np.full(41, 3), 20)
  rules = ConductorSpec(admission='load')
  beliefs = {'decode1': belief_of(spec.of('decode1'), MODEL, slow)}
  conductor = Conductor(rules, spec, MODEL, COSTS, slo, beliefs)
  assert conductor.keeps_tbt(asked, 'decode0', 10, 400)
  assert not conductor.keeps_tbt(asked, 'decode0', 10, 410)
  assert not conductor.keeps_tbt(asked, 'decode1', 1, 1)


def test_sizes_that_can_not_be_are_named():
  with pytest.raises(ValueError, match=r'InstanceSizes.host_bytes=-1 must'):
    InstanceSizes(host_bytes=-1)
  with pytest.raises(ValueError, match='InstanceSizes.tensor_parallel=0 must'):
    InstanceSizes(tensor_parallel=0)
  with pytest.raises(ValueError, match="instances: 'prefill9' is not one of"):
    replace(SMALL, instances={'prefill9': InstanceSizes()})
  small = {'decode1': InstanceSizes(decode_pool_tokens=64)}
  spec = replace(SMALL, instances=small, max_tokens=96)
  with pytest.raises(ValueError, match=r"'decode1'\].decode_pool_tokens=64"):
    spec.max_request_tokens(MODEL)
  with pytest.raises(ValueError, match='tensor_parallel=1 and 2'):
    replace(
      SMALL,
      colocated=True,
      streaming='chunks',
      instances={'decode0': InstanceSizes(tensor_parallel=2)},
    )


def test_a_run_file_says_which_instances_differ(tmp_path):
  path = tmp_path / 'run.gin'
  path.write_text(
    "include 'configs/run/sim_conversation.gin'\n"
    'from __gin__ import dynamic_registration\n'
    'import mooncake_jax.costs.model as costs\n'
    'import scripts.experiment as experiment\n'
    "experiment.Experiment.instances = {'prefill3': @new/costs."
    'PolynomialCost()}\n'
    'new/costs.PolynomialCost.prefill_s_per_token = 3e-5\n'
    'import mooncake_jax.cluster_spec as cluster_spec\n'
    "cluster_spec.ClusterSpec.instances = {'prefill3': "
    '@cluster_spec.InstanceSizes()}\n'
    'cluster_spec.InstanceSizes.host_bytes = 1000\n'
  )
  experiment, operative = load(path, (), Experiment)
  new = experiment.instances['prefill3']
  assert new.prefill_s(8192, 0) < 0.4 * experiment.costs.prefill_s(8192, 0)
  assert experiment.cluster.of('prefill3').host_bytes == 1000
  assert experiment.cluster.of('prefill2').host_bytes > 1000
  assert 'prefill3' in operative


def test_an_instance_that_there_is_not_is_named():
  with pytest.raises(ValueError, match="instances: 'prefill9' is not one of"):
    tiny(backend='virtual', instances={'prefill9': COSTS})
  with pytest.raises(ValueError, match='true_instances=.* needs'):
    tiny(true_instances={'prefill0': COSTS})
