# SPDX-License-Identifier: Apache-2.0
"""The double check before decode: who would break the TBT limit is refused."""

from dataclasses import replace

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO
from test_once_broken import prompt


def _late(spec, costs, num_requests, **kwargs):
  """Outcomes, in order, the longest step and what it may take.

  With a limit that a batch of a few rows keeps.
  """
  step_s = 0.00235
  # Of 20 tokens the longest two intervals count; the first is half a step more.
  slo = SLO(ttft_s=30.0, tbt_s=1.25 * step_s)
  rules = ConductorSpec(late_check=True, **kwargs)
  conductor = Conductor(rules, spec, MODEL, COSTS, slo)
  cluster = Cluster(
    spec, MODEL, VirtualBackend(costs, LAYERS), conductor.keeps_tbt
  )
  requests = [
    make_request(f'r{i}', prompt(i + 3, 50), 20) for i in range(num_requests)
  ]
  records, _ = serve(requests, conductor, cluster)
  steps_s = [s.interval_s for r in records for s in r.segments if s.count > 1]
  return [r.outcome for r in records], max(steps_s), step_s


def test_a_full_batch_is_judged_by_the_rows_it_has():
  """Two rows at each of two instances keep the limit, whoever waits doesn't.

  A wait for a row is time between a request's first two tokens.
  """
  outcomes, *_ = _late(replace(SPEC, max_batch=2), COSTS, 8)
  assert outcomes == ['completed'] * 4 + ['rejected_late'] * 4


def test_the_late_check_counts_what_is_still_under_way():
  spec = replace(SPEC, prefill_instances=4, decode_instances=1, max_batch=8)
  costs = replace(COSTS, handoff_latency_s=0.5)
  outcomes, slowest_s, limit_s = _late(
    spec, costs, 6, admission='none', policy='load_balancing'
  )
  assert {*outcomes} == {'completed', 'rejected_late'}
  assert slowest_s <= limit_s
