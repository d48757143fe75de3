# SPDX-License-Identifier: Apache-2.0
"""Where batches or pools are full: predicted waits are those that come."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import InstanceSizes
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.corrections import Lateness
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.metrics.latency import tail_s
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO

NO_LIMIT = SLO(1e3, 1e3)
FULL = replace(
  SPEC, decode_instances=1, decode_pool_tokens=1 << 16, request_timeout_s=1e4
)


def _served(spec, count, every_s, slo=NO_LIMIT, admission='none'):
  """Requests of 20 to 59 tokens each way, `every_s` apart."""
  rng = np.random.default_rng(0)
  sizes = rng.integers(20, 60, (count, 2)).tolist()
  requests = [
    make_request(f'r{i}', np.full(prompt, i), output, every_s * i)
    for i, (prompt, output) in enumerate(sizes)
  ]
  rules = ConductorSpec(policy='cost_based', admission=admission)
  conductor = Conductor(rules, spec, MODEL, COSTS, slo)
  cluster = Cluster(
    spec,
    MODEL,
    VirtualBackend(COSTS, spec.layers_of_stages(MODEL)),
    conductor.keeps_tbt if rules.checks_late else None,
    COSTS,
  )
  return serve(requests, conductor, cluster)[0]


def test_a_wait_for_a_row_is_in_the_predicted_tbt():
  """Twice as many requests as two rows can serve."""
  records = _served(replace(FULL, max_batch=2), 60, 0.025)
  said_s = np.array([r.predicted_tbt_s for r in records])
  took_s = np.array([tail_s(r.segments) for r in records])
  assert took_s.max() > 0.1 > 20 * COSTS.decode_step_s(2, 200)
  assert np.median(np.abs(said_s - took_s)) < 0.2 * took_s.mean()
  assert abs(said_s.mean() - took_s.mean()) < 0.1 * took_s.mean()


@pytest.mark.parametrize(
  'admission',
  ['load', 'early_rejection', 'early_rejection_predicted', 'slo_predictive'],
)
def test_what_would_wait_too_long_for_a_row_is_refused(admission):
  slo = SLO(1e3, 0.02)
  spec = replace(FULL, max_batch=2)
  kept = {
    name: sum(
      all(slo.kept(r.ttft_s, tail_s(r.segments)))
      for r in _served(spec, 60, 0.025, slo, name)
    )
    for name in ('none', admission)
  }
  assert kept[admission] > 2 * kept['none']


def test_where_all_batches_are_full_the_shortest_wait_decides():
  """The instance of twice the rows gets about twice the requests."""
  spec = replace(
    FULL,
    decode_instances=3,
    max_batch=1,
    instances={'decode0': InstanceSizes(max_batch=2)},
  )
  at = Counter(r.decode for r in _served(spec, 80, 0.01))
  assert at['decode1'] == pytest.approx(at['decode2'], abs=3)
  assert at['decode0'] == pytest.approx(2 * at['decode1'], rel=0.2)


def test_a_wait_for_room_grows_with_the_backlog():
  """Room for four of forty requests: the last waits nine outputs long."""
  spec = replace(FULL, decode_pool_tokens=400)
  records = _served(spec, 40, 0.0)
  said_s = np.array([r.predicted_ttft_s for r in records[8:]])
  took_s = np.array([r.ttft_s for r in records[8:]])
  assert said_s / took_s == pytest.approx(1.0, abs=0.4)


def test_who_is_let_in_where_room_is_short_keeps_the_limit():
  """The backlog is let grow to the limit, less what predictions are off."""
  spec = replace(FULL, decode_pool_tokens=400)
  slo = SLO(0.3, 1e3)
  records = _served(spec, 120, 0.01, slo, 'early_rejection')
  came_s = [r.ttft_s for r in records if r.ttft_s is not None]
  late = sum(ttft_s > slo.ttft_s for ttft_s in came_s)
  assert 40 < len(came_s) < 80
  assert late < 0.15 * len(came_s)


def test_a_margin_is_kept_by_nine_of_ten():
  lateness, rng = Lateness(True), np.random.default_rng(0)
  said_s = rng.uniform(5, 30, 4000)
  took_s = said_s * (1 + rng.logistic(0, 0.1, 4000))
  for said, took in zip(said_s.tolist(), took_s.tolist()):
    lateness.observe(said, took)
  kept = np.mean(took_s <= lateness.margin * said_s)
  assert kept == pytest.approx(0.9, abs=0.03)
