# SPDX-License-Identifier: Apache-2.0
"""The search for the highest rate: what it finds holds, and can be known."""

from dataclasses import replace
import json

import pytest

from lifecycle import COSTS
from mooncake_jax.slo import SLO
from mooncake_jax.workload.generate import distinct_prompts
from scripts import capacity
from scripts.capacity import at_rate
from scripts.capacity import requests_per_s
from scripts.capacity import search
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.workloads import TraceWorkload
from tiny_experiment import tiny

TOKENS = 8
PREFILL_S = COSTS.prompt_s(TOKENS, 0, TOKENS)


def one_by_one(count: int = 120, **changes):
  """Prompts that share nothing, slowly, and an SLO of one wait of a prompt."""
  rows = distinct_prompts(TOKENS, count, interval_s=4 * PREFILL_S)
  return tiny(
    backend='virtual',
    workload=TraceWorkload(rows),
    slo=SLO(ttft_s=2 * PREFILL_S, tbt_s=1.0),
    **changes,
  )


def test_prefill_that_keeps_up_is_all_that_holds_back():
  experiment = one_by_one()
  found = search(experiment, target=0.99, tolerance=0.02)
  prefills = experiment.cluster.prefill_instances
  assert found.native_requests_per_s == pytest.approx(1 / (4 * PREFILL_S))
  # Regular arrivals: no wait up to the rate at which the queue begins to grow.
  assert found.found.requests_per_s == pytest.approx(
    prefills / PREFILL_S, rel=0.05
  )
  assert found.instances == prefills + experiment.cluster.decode_instances


def test_what_is_found_attains_the_target_and_the_next_does_not():
  experiment = one_by_one(60)
  found = search(experiment, target=0.8, tolerance=0.1)
  assert found == search(experiment, target=0.8, tolerance=0.1)
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)

  def attained(rate: float) -> float:
    slower = replace(prepared, requests=at_rate(prepared.requests, rate))
    with backends(experiment, config) as make_backend:
      outcome = serve_once(experiment, config, slower, make_backend())
    return outcome.summary.effective_request_capacity

  low, high = found.found.requests_per_s, found.found.bound_requests_per_s
  assert low and high
  assert attained(low) >= 0.8 > attained(high)


def test_a_scaled_rate_is_that_rate_and_keeps_the_pattern():
  experiment = one_by_one(5)
  requests = prepare(experiment, experiment.model.read_config()).requests
  faster = at_rate(requests, 7.0)
  assert requests_per_s(faster) == pytest.approx(7.0)
  assert [r.arrival_s for r in faster] == pytest.approx(
    [i / 7.0 for i in range(5)]
  )


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'backend': 'device'}, "backend='device' must be 'virtual'"),
    (
      {
        'backend': 'virtual',
        'workload': TraceWorkload(distinct_prompts(TOKENS, 3)),
      },
      '3 requests at .* have no rate',
    ),
  ],
)
def test_a_workload_without_a_rate_is_told(changes, message):
  with pytest.raises(ValueError, match=message):
    search(tiny(**changes))


def test_the_command_searches_for_each_value(tmp_path, capsys):
  out = tmp_path / 'found.json'
  arguments = ['configs/run/sim_conversation.gin', '--tolerance', '0.5']
  arguments += ['--bind', 'conversation.num_requests=30', '--max-scale', '2']
  arguments += ['--over', 'ConductorSpec.policy=["random", "load_balancing"]']
  assert capacity.main([*arguments, '--out', str(out)]) == 0
  found = json.loads(out.read_text())
  assert [*found] == [
    'ConductorSpec.policy=random',
    'ConductorSpec.policy=load_balancing',
  ]
  assert all(f['found']['requests_per_s'] > 0 for f in found.values())
  assert capsys.readouterr().out.count('requests/s at 90%') == 2
