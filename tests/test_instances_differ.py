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
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
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


def test_a_run_file_says_which_instances_differ(tmp_path):
  path = tmp_path / 'run.gin'
  path.write_text(
    "include 'configs/run/sim_conversation.gin'\n"
    'from __gin__ import dynamic_registration\n'
    'import mooncake_jax.costs.roofline as roofline\n'
    'import scripts.experiment as experiment\n'
    "experiment.Experiment.instances = {'prefill3': @new/roofline."
    'RooflineCost()}\n'
    'new/roofline.RooflineCost.peak_flops_per_s = 989e12\n'
  )
  experiment, operative = load(path, (), Experiment)
  new = experiment.instances['prefill3']
  assert new.prefill_s(8192, 0) < 0.4 * experiment.costs.prefill_s(8192, 0)
  assert 'prefill3' in operative


def test_an_instance_that_there_is_not_is_named():
  with pytest.raises(ValueError, match="instances: 'prefill9' is not one of"):
    tiny(backend='virtual', instances={'prefill9': COSTS})
  with pytest.raises(ValueError, match='true_instances=.* needs'):
    tiny(true_instances={'prefill0': COSTS})
