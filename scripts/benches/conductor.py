# SPDX-License-Identifier: Apache-2.0
"""Placements a second by policy and cluster size, on the conversation trace.

The trace runs as much faster as the cluster is larger than the paper's 8 + 8
instances. Between placements the Conductor hears what becomes of requests:
blocks stored and evicted, prefixes fetched, tokens. One core, CPU-seconds of
this thread, the garbage collector as always.
"""

from collections.abc import Sequence
from dataclasses import replace
import time

import numpy as np

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import fit_decode
from mooncake_jax.costs.fit import fit_prefill
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.roofline import RooflineCost
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO
from mooncake_jax.workload.tokens import to_requests
from scripts.benches.conductor_load import ToldCluster
from scripts.benches.rows import Row
from scripts.fit_costs import llama_70b
from scripts.workloads import published

TRACE = 'conversation_trace.jsonl'
SIZES = {8: 10_000.0, 100: None, 500: 2_000.0}  # instances: placements a second
P99_S = 2e-3
PAPER_INSTANCES = 8
BLOCK_TOKENS = 512
HOST_TOKENS = 3_000_000  # an instance's host memory, as in section 5.4


def conductor(quick: bool) -> list[Row]:
  """Every policy at every size."""
  rows = published(TRACE).rows[: 2000 if quick else None]
  requests = to_requests(rows, block_size_tokens=BLOCK_TOKENS)
  costs = fitted(a800_x8())
  found = []
  for num, target in SIZES.items():
    faster = num / PAPER_INSTANCES
    sped_up = [replace(r, arrival_s=r.arrival_s / faster) for r in requests]
    for policy in POLICIES:
      runs = [Measured(policy, num, costs) for _ in range(1 if quick else 3)]
      for run in runs:
        run.serve(sped_up)
      best = min(runs, key=lambda run: sum(run.place_s))
      found += best.rows(f'conductor.{num}p{num}d.{policy}', target)
  return found


class Measured:
  """One Conductor, and what its calls took."""

  def __init__(self, policy: str, instances: int, costs: PolynomialCost):
    spec = ClusterSpec(
      prefill_instances=instances,
      decode_instances=instances,
      block_size_tokens=BLOCK_TOKENS,
      chunk_tokens=8192,
      kv_dtype='bfloat16',
      decode_pool_tokens=1_300_000,
      max_batch=256,
    )
    self._conductor = Conductor(
      ConductorSpec(policy=policy), spec, llama_70b(), costs, SLO(30.0, 0.2)
    )
    self._cluster = ToldCluster(
      HOST_TOKENS // BLOCK_TOKENS, spec.chunk_tokens // BLOCK_TOKENS
    )
    self.place_s: list[float] = []
    self._observe_s = 0.0
    self._num_events = 0
    self._num_placed = 0

  def serve(self, requests: Sequence[Request]) -> None:
    """Places all requests, telling what happens meanwhile."""
    clock, place = time.thread_time, self._conductor.place
    for request in requests:
      self._hear(request.arrival_s)
      start_s = clock()
      decision = place(request, request.arrival_s)
      self.place_s.append(clock() - start_s)
      if isinstance(decision, Placement):
        self._num_placed += 1
        self._cluster.submit(request, decision)

  def rows(self, name: str, target: float | None) -> list[Row]:
    """Rates and percentiles."""
    count, place_s = len(self.place_s), sum(self.place_s)
    p50_s, p99_s = np.percentile(self.place_s, (50, 99))
    admitted = f'{self._num_placed} of {count} admitted'
    events = f'{self._num_events / count:.1f} events a request'
    whole_s = place_s + self._observe_s
    return [
      Row(f'{name}.place', count / place_s, '1/s', admitted, target=target),
      Row(f'{name}.with_events', count / whole_s, '1/s', events),
      Row(f'{name}.p50', float(p50_s), 's'),
      Row(f'{name}.p99', float(p99_s), 's', target=P99_S, at_most=True),
    ]

  def _hear(self, now_s: float) -> None:
    events, observe = self._cluster.until(now_s), self._conductor.observe
    start_s = time.thread_time()
    for event in events:
      observe(event)
    self._observe_s += time.thread_time() - start_s
    self._num_events += len(events)


def a800_x8() -> RooflineCost:
  """An instance of the paper's: FAST'25 Table 1."""
  return RooflineCost(
    llama_70b(),
    peak_flops_per_s=312e12,
    hbm_bytes_per_s=2.039e12,
    onload_bytes_per_s=128e9,
    offload_bytes_per_s=128e9,
    copy_bytes_per_s=100e9,
    handoff_bytes_per_s=100e9,
    num_devices=8,
  )


def fitted(truth: RooflineCost) -> PolynomialCost:
  """The polynomials nearest to a data sheet's costs; links as they are."""
  prefill = [
    PrefillSample(tokens, prefix, truth.prefill_s(tokens, prefix))
    for tokens in (512, 2048, 8192)
    for prefix in (0, 8192, 65536)
  ]
  decode = [
    DecodeSample(rows, context, truth.decode_step_s(rows, context))
    for rows in (1, 32, 256)
    for context in (10_000, 100_000, 1_000_000)
  ]
  links = {
    name: value
    for name, value in vars(truth).items()
    if name.endswith(('_bytes_per_s', '_latency_s')) and name[:3] != 'hbm'
  }
  return PolynomialCost(
    **fit_prefill(prefill).coefficients,
    **fit_decode(decode).coefficients,
    **links,
  )
