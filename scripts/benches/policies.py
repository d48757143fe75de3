# SPDX-License-Identifier: Apache-2.0
"""Mean TTFT by policy, cluster size and load, on both published traces.

The paper's instances in simulation, everybody admitted, the Conductor's
beliefs equal to the truth. What is asked of `cost_based` is that no other
policy is faster. Load 1 is a trace's own rate, whatever the size: 4 + 4
instances are too few for it, 32 + 32 are mostly idle.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.workload.scale import TraceScale
from scripts.benches.rows import Row
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import serve_alone
from scripts.workloads import published
from scripts.workloads import TraceWorkload

RUN = 'configs/run/sim_published_conversation.gin'
TRACES = ('conversation', 'synthetic')
INSTANCES = (4, 8, 16, 32)
SPEEDS = (1.0, 2.0)
REQUESTS = 1200  # the first ones of a trace: a run takes seconds
MAX_PROMPT_TOKENS = 128_000  # longer ones are cut: the model takes no more
NEVER_S = 1e6  # nobody is given up, so that all policies serve the same


def policies(quick: bool) -> Iterator[Row]:
  """Every policy at every size and load, cost_based against the best one."""
  cases = product(TRACES, INSTANCES, SPEEDS)
  for trace, instances, speed in [(TRACES[0], 8, 1.0)] if quick else cases:
    name = f'policies.{trace}.{instances}p{instances}d.x{speed:g}'
    scale = TraceScale(
      num_requests=300 if quick else REQUESTS,
      time_scale=speed,
      max_prompt_tokens=MAX_PROMPT_TOKENS,
      too_long='cut',
    )
    yield from compare(name, trace, scale, instances)


def compare(
  name: str, trace: str, scale: TraceScale, instances: int
) -> Iterator[Row]:
  """One case: mean TTFT of each policy, and cost_based over the best other."""
  found: dict[str, float] = {}
  for policy in POLICIES:
    rules = ConductorSpec(policy=policy, admission='none', correct=False)
    summary = simulate(trace, scale, instances, rules)
    assert summary.completed == summary.offered, f'{name} {policy}'
    found[policy] = summary.ttft_s['mean'] or 0.0
    hits = f'hit rate {summary.hit_rate:.3f}'
    yield Row(f'{name}.{policy}.ttft_mean', found[policy], 's', hits)
  ours = found.pop('cost_based')
  best = min(found, key=lambda policy: found[policy])
  ratio = ours / found[best]
  yield Row(f'{name}.over_best', ratio, 'ratio', best, 1.0, at_most=True)


def simulate(
  trace: str,
  scale: TraceScale,
  instances: int,
  rules: ConductorSpec,
  **cluster,
) -> Summary:
  """Serves a trace on so many prefill and decode instances of the paper."""
  experiment, _ = load(RUN, [], Experiment)
  experiment = replace(
    experiment,
    workload=TraceWorkload(published(f'{trace}_trace.jsonl'), scale),
    conductor=rules,
    cluster=replace(
      experiment.cluster,
      prefill_instances=instances,
      decode_instances=instances,
      request_timeout_s=NEVER_S,
      transfer_timeout_s=NEVER_S,
      **cluster,
    ),
  )
  return serve_alone(experiment).summary
