# SPDX-License-Identifier: Apache-2.0
"""Small clusters and workloads for tests that run on both backends."""

from dataclasses import replace

import numpy as np

from engine_pieces import MODEL as MODEL
from engine_pieces import tiny_params
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.request import Request
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO
from scripts.device import instance_specs

SPEC = ClusterSpec(
  block_size_tokens=8,
  page_tokens=4,
  chunk_tokens=12,
  layers_per_transfer=2,
  prefill_pool_tokens=256,
  decode_pool_tokens=512,
  max_batch=4,
  max_decode_steps=8,
  host_bytes=1 << 20,
  request_timeout_s=120.0,
)
COSTS = PolynomialCost(
  prefill_base_s=1e-3,
  prefill_s_per_prefix_token=1e-6,
  prefill_s_per_token=1e-4,
  prefill_s_per_token_squared=1e-8,
  decode_base_s=2e-3,
  decode_s_per_row=1e-4,
  decode_s_per_context_token=1e-6,
  onload_bytes_per_s=1e9,
  onload_latency_s=1e-5,
  offload_bytes_per_s=1e9,
  offload_latency_s=1e-5,
  copy_bytes_per_s=5e8,
  copy_latency_s=2e-5,
  handoff_bytes_per_s=1e9,
  handoff_latency_s=1e-5,
)
LAYERS = (MODEL.num_layers,)
LOOSE = SLO(ttft_s=30.0, tbt_s=10.0)


def make_request(name, prompt, output=5, arrival_s=0.0, **kwargs) -> Request:
  """A request of int tokens, keyed for SPEC's blocks."""
  prompt = np.asarray(prompt, np.int32)
  return Request(
    name,
    arrival_s,
    len(prompt),
    output,
    prefix_keys(prompt, SPEC.block_size_tokens),
    prompt,
    **kwargs,
  )


def shared_prefix_requests(
  count, prefix=24, suffix=11, output=5, seed=0, every_s=0.0
) -> list[Request]:
  """Requests with one prefix and different tails, `every_s` apart."""
  rng = np.random.default_rng(seed)
  head = rng.integers(2, MODEL.vocab_size, prefix)
  return [
    make_request(
      f'r{i}',
      np.concatenate([head, rng.integers(2, MODEL.vocab_size, suffix + i % 3)]),
      output,
      every_s * i,
    )
    for i in range(count)
  ]


def make_conductor(spec=SPEC, slo=LOOSE, **kwargs) -> Conductor:
  rules = ConductorSpec(**{'correct': False, **kwargs})
  return Conductor(rules, spec, MODEL, COSTS, slo)


def make_device(spec=SPEC, stores=()) -> Cluster:
  """A cluster on simulated devices; close its backend."""
  backend = DeviceBackend(
    MODEL,
    spec.layout(MODEL),
    instance_specs(spec, MODEL),
    tiny_params(),
    stores=stores,
  )
  cluster = Cluster(spec, MODEL, backend, costs=COSTS)
  warmup(backend)
  return cluster


def close(cluster: Cluster) -> None:
  """Ends the threads of a cluster on devices."""
  assert isinstance(cluster.backend, DeviceBackend)
  cluster.backend.close()


def make_virtual(
  spec=SPEC, costs: CostModel | None = COSTS, **kwargs
) -> Cluster:
  """A simulated cluster that takes, and thinks to take, `costs`."""
  spec = replace(spec, **kwargs)
  backend = VirtualBackend(costs or COSTS, spec.layers_of_stages(MODEL))
  return Cluster(spec, MODEL, backend, costs=costs)
