# SPDX-License-Identifier: Apache-2.0
"""Random specs, requests and rules of a cluster, for `fuzz.py`."""

from dataclasses import replace
import random

import numpy as np

from lifecycle import COSTS
from lifecycle import MODEL
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.admission import ADMISSIONS
from mooncake_jax.conductor.heat import Replication
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.roles import RoleRules
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.request import Request
from mooncake_jax.store import eviction
from shadow import output_of

NUM_REQUESTS = 30


def random_spec(rng: random.Random) -> ClusterSpec:
  size = rng.choice((4, 8, 16))
  stage_layers = rng.choice(((), (), (1, 2), (2, 1), (1, 1, 1)))
  block_bytes = size * 3 * 128
  prefill, decode = rng.choice((1, 1, 2, 3)), rng.choice((1, 2))
  # Of each role but the first.
  spare = [f'prefill{i}' for i in range(1, prefill)]
  spare += [f'decode{i}' for i in range(1, decode)]
  return ClusterSpec(
    prefill_instances=prefill,
    decode_instances=decode,
    absent=tuple(name for name in spare if rng.random() < 0.2),
    block_size_tokens=size,
    page_tokens=rng.choice([p for p in (2, 4, 8, 16) if size % p == 0]),
    chunk_tokens=rng.choice((1, 5, 8, 12, 64, 300)),
    stages=max(len(stage_layers), 1),
    stage_layers=stage_layers,
    chunking=rng.choice(('fixed', 'fixed', 'dynamic', 'auto')),
    streaming=rng.choice(('layers', 'layers', 'layers', 'chunks', 'prompt')),
    layers_per_transfer=rng.choice((1, 2, 3)),
    prefill_pool_tokens=rng.choice((64, 128, 256)),
    decode_pool_tokens=rng.choice((64, 64, 96, 512)),
    decode_reserve=rng.choice(('all', 'prompt', 'prompt')),
    device_cache_tokens=rng.choice((0, 16, 40, 96)),
    max_tokens=64,
    max_batch=rng.choice((1, 2, 4, 8)),
    max_decode_steps=rng.choice((1, 8)),
    host_bytes=rng.choice((1, 5, 9, 9, 40)) * block_bytes,
    ssd_bytes=rng.choice((0, 0, 12, 80)) * block_bytes,
    promote_hits=rng.choice((1, 2)),
    eviction=rng.choice(list(eviction.POLICIES)),
    high_watermark=rng.choice((0.5, 0.95, 1.0)),
    reuse=rng.random() < 0.95,
    store_output=rng.random() < 0.7,
    lease_s=rng.choice((1e-9, 1e-4, 0.01, 0.1, 10.0)),
    transfer_timeout_s=rng.choice((1e-4, 0.01, 30.0)),
    request_timeout_s=rng.choice((0.02, 0.1, 100.0)),
    mooncake_bytes=rng.choice((0, 0, 2, 9, 80)) * block_bytes,
    mooncake_put_uses=rng.choice((1, 2)),
    probe_timeout_s=rng.choice((1e-4, 0.01, 1.0)),
  )


def random_requests(spec: ClusterSpec, seed: int) -> list[Request]:
  """Prompts of shared heads; lengths of 1 and on block boundaries too.

  Some go on from a whole earlier one and its output; of some nobody knows what
  keys the output's blocks have.
  """
  rng, size = random.Random(seed), spec.block_size_tokens
  draw = np.random.default_rng(seed)
  heads = [draw.integers(2, 60, 48) for _ in range(rng.choice((1, 3)))]
  outputs = rng.choice(((1, 1, 2, 5, 12, 30), (1, 30, 50, 50, 60)))
  every_s = rng.choice(((0.01, 0.1, 0.5), (0.01,)))
  requests = []
  for i in range(NUM_REQUESTS):
    output = rng.choice(outputs)
    most = 64 - output
    length = min(
      most,
      rng.choice((1, 2, size, 2 * size, 3 * size + 1, 40, most)),
    )
    head = rng.choice(heads)[: rng.choice((0, rng.randint(0, 48), 48))]
    if requests and rng.random() < 0.3:
      before = rng.choice(requests)
      assert before.prompt is not None
      head = np.concatenate([before.prompt, output_of(before)])
    prompt = np.concatenate([head, draw.integers(2, 60, 64)])[:length]
    prompt = prompt.astype(np.int32)
    request = Request(
      f'r{i}',
      rng.random() * rng.choice(every_s),
      length,
      output,
      prefix_keys(prompt, size),
      prompt,
    )
    if rng.random() < 0.7:
      whole = prefix_keys(np.concatenate([prompt, output_of(request)]), size)
      of_output = whole[len(request.block_keys) :]
      request = replace(request, output_block_keys=of_output)
    requests.append(request)
  return requests


def random_rules(rng: random.Random) -> ConductorSpec:
  return ConductorSpec(
    policy=rng.choice(list(POLICIES)),
    admission=rng.choice(list(ADMISSIONS)),
    late_check=rng.random() < 0.3,
    balancing_threshold=rng.choice((1.0, 2.0)),
    max_attempts=rng.choice((1, 2, 3, 9)),
    replication=rng.choice(
      (
        None,
        Replication(1e-3, 1e-4, 1.0, 1e9, 1.0, min_blocks=1, look_every_s=0.0),
      )
    ),
    roles=rng.choice((None, RoleRules(0.01, 1e-3, 1e-2, 0.05))),
    telemetry=Telemetry(
      rng.choice((0, 0, 0, 1e-3, 0.1)), rng.choice((0, 0, 0, 0.1, 0.99))
    ),
  )


def random_beliefs(
  rng: random.Random, spec: ClusterSpec
) -> dict[str, InstanceBelief]:
  """Some instances are thought to be slower, or without a way to read."""
  usual = belief_of(spec, MODEL, COSTS)
  slow = replace(COSTS, prefill_s_per_token=1e-3, decode_base_s=0.01)
  far = replace(COSTS, onload_latency_s=0.5, copy_bytes_per_s=1e5)
  beliefs = (usual, replace(usual, costs=slow), replace(usual, costs=far))
  names = (*spec.prefill_names, *spec.decode_names)
  return {n: rng.choice(beliefs) for n in names if rng.random() < 0.2}
