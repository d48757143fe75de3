# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared, as experiments on equally many nodes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mooncake_jax.costs.links import with_bandwidth
from mooncake_jax.costs.perturbed import PerturbedCost
from scripts.assessment.spec import Assessment
from scripts.experiment import Experiment

# Tokens of a step are vLLM's default where None.
COUPLED: Mapping[str, tuple[bool, bool, int | None]] = {
  # (prefix caching, chunked prefill, tokens a step)
  'coupled': (False, False, None),
  'coupled, prefix cache': (True, False, None),
  'coupled, chunked prefill': (False, True, None),
  'coupled, both': (True, True, None),
  'coupled, both, 2048 a step': (True, True, 2048),
}


def coupled(assessment: Assessment, nodes: int) -> dict[str, Experiment]:
  """One pool of vLLM-like nodes, with and without its two features.

  Where it caches prompts, requests go where most of them is cached already,
  within the load.
  """
  return {
    name: replace(
      assessment.experiment,
      vllm=replace(
        assessment.vllm,
        instances=nodes,
        prefix_caching=caching,
        chunked_prefill=chunked,
        step_tokens=step_tokens,
        routing='least_uncached' if caching else 'least_tokens',
      ),
    )
    for name, (caching, chunked, step_tokens) in COUPLED.items()
  }


def mooncake(
  assessment: Assessment, nodes: int, prefill: int, **cluster
) -> Experiment:
  """So many prefill nodes, the others decode; nobody is refused."""
  experiment = assessment.experiment
  return replace(
    experiment,
    cluster=replace(
      experiment.cluster,
      prefill_instances=prefill,
      decode_instances=nodes - prefill,
      **cluster,
    ),
    conductor=replace(experiment.conductor, admission='none'),
  )


def apart(assessment: Assessment, nodes: int, prefill: int) -> Experiment:
  """DistServe-like: no store, the shortest queue, KVCache moved whole."""
  whole = mooncake(assessment, nodes, prefill, reuse=False, streaming='prompt')
  return replace(
    whole, conductor=replace(whole.conductor, policy='load_balancing')
  )


def with_cpp(
  assessment: Assessment, nodes: int, stages: int, groups: int
) -> Experiment:
  """Groups of `stages` prefill nodes, a pipeline each; the others decode.

  A group has all memory and all links of its nodes, as if they had stayed
  alone.
  """
  experiment = mooncake(
    assessment,
    nodes,
    groups,
    stages=stages,
    chunk_tokens=assessment.chunk_tokens,
  )
  cluster, costs = experiment.cluster, experiment.costs
  cluster = replace(
    cluster,
    decode_instances=nodes - groups * stages,
    host_bytes=cluster.host_bytes * stages,
    prefill_pool_tokens=cluster.prefill_pool_tokens * stages,
  )
  wide = with_bandwidth(costs, stages)
  return replace(
    experiment,
    cluster=cluster,
    instances=dict.fromkeys(cluster.prefill_names, wide),
  )


def groupings(nodes: int, near: int, most: int = 6) -> list[tuple[int, int]]:
  """(nodes a group, groups) for CPP that leave one node to decode.

  Of these those that take about `near` nodes; none of two nodes.
  """
  found = [
    (stages, groups)
    for stages in range(2, nodes)
    for groups in range(1, (nodes - 1) // stages + 1)
  ]
  return sorted(found, key=lambda each: abs(each[0] * each[1] - near))[:most]


def with_rejection(
  assessment: Assessment, nodes: int, prefill: int
) -> Experiment:
  """The Conductor refuses whom it could not serve within the limits."""
  whole = mooncake(assessment, nodes, prefill)
  return replace(
    whole, conductor=replace(whole.conductor, admission=assessment.admission)
  )


def splits(nodes: int) -> list[int]:
  """Numbers of prefill nodes to try: up to six, from few to most."""
  wanted = {round(nodes * share / 8) for share in (1, 2, 4, 5, 6, 7)}
  return sorted(min(max(n, 1), nodes - 1) for n in wanted)


def otherwise(
  experiment: Experiment, error: float, noise: float
) -> dict[str, Experiment]:
  """The same where things are not as predicted; the split stays as it is.

  Costs that are wrong alike make all systems slower or faster alike; wrong
  against each other they move the balance of prefill and decode.
  """
  more, less = 1 + error, 1 / (1 + error)
  return {
    f'prefill {error:.0%} slower, decode faster': _truly(
      experiment, prefill_bias=more, decode_bias=less
    ),
    f'prefill {error:.0%} faster, decode slower': _truly(
      experiment, prefill_bias=less, decode_bias=more
    ),
    f'each work off by {noise:.0%}': _truly(
      experiment, prefill_noise=noise, transfer_noise=noise
    ),
  }


def _truly(experiment: Experiment, **off: Any) -> Experiment:
  """Where works take other times than the Conductor believes."""
  return replace(
    experiment,
    truth=PerturbedCost(experiment.costs, **off),
    true_instances={
      name: PerturbedCost(costs, **off)
      for name, costs in experiment.instances.items()
    },
  )
