# SPDX-License-Identifier: Apache-2.0
"""What it costs to have instances in processes of their own.

The same prompts, one after another on idle clusters, in turns: one prefill and
one decode instance as two processes, and as threads of one. The model is small
enough for the difference to be seen.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
import itertools
from statistics import median
from typing import NamedTuple

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from scripts.benches.lines import lines
from scripts.benches.rows import Row
from scripts.benches.wires import DEVICES
from scripts.benches.wires import wires
from scripts.config import load
from scripts.device import device_backend
from scripts.experiment import Experiment
from scripts.ray_cluster import ray_backend

RUN = 'configs/run/ray_small.gin'
SPEC = ClusterSpec(
  prefill_instances=1,
  decode_instances=1,
  block_size_tokens=64,
  page_tokens=32,
  chunk_tokens=256,
  layers_per_transfer=4,
  max_tokens=1024,
  prefill_pool_tokens=1024,
  decode_pool_tokens=1024,
  max_batch=4,
  host_bytes=0,
  reuse=False,
)
PROMPT, OUTPUT = 512, 64
TTFT_LIMIT_S, TBT_LIMIT_S = 5e-3, 1e-3


class Life(NamedTuple):
  """Of one request on an idle cluster."""

  ttft_s: float
  handoff_s: float
  tbt_s: float
  tokens: tuple[int, ...]


def cluster(quick: bool) -> list[Row]:
  """Overheads of processes, and their wires."""
  rows = [*_overheads(9 if quick else 41)]
  return [*rows, *lines(quick), *wires(quick)]


def _overheads(turns: int) -> Iterator[Row]:
  base, _ = load(RUN, (), Experiment)
  base = replace(base, cluster=SPEC)
  config = base.model.read_config()
  spec = RaySpec(wire=WireSpec('nixl', devices=DEVICES))
  with ExitStack() as stack:
    apart = stack.enter_context(ray_backend(replace(base, ray=spec), config))
    alone = replace(base, backend='device', ray=None)
    one = stack.enter_context(device_backend(alone, config))
    clusters = [Cluster(SPEC, config, backend) for backend in (apart, one)]
    ids = itertools.count()
    lives = [
      [_serve(each, number // 2, config.vocab_size) for each in clusters]
      for number in itertools.islice(ids, 2, turns + 2)
    ]
  yield Row(
    'cluster.same_tokens',
    float(np.mean([a.tokens == b.tokens for a, b in lives])),
    'ratio',
    f'{turns} requests, in processes and in one',
    1.0,
  )
  for field, limit_s in (
    ('ttft_s', TTFT_LIMIT_S),
    ('tbt_s', TBT_LIMIT_S),
    ('handoff_s', None),
  ):
    pairs = [(getattr(a, field), getattr(b, field)) for a, b in lives]
    yield Row(
      f'cluster.{field}_more',
      median(a - b for a, b in pairs),
      's',
      f'median of pairs; in one process {median(b for _, b in pairs):.3g} s',
      limit_s,
      at_most=True,
    )


def _serve(cluster: Cluster, number: int, vocab_size: int) -> Life:
  rng = np.random.default_rng(number)
  prompt = rng.integers(2, vocab_size, PROMPT).astype(np.int32)
  keys = prefix_keys(prompt, SPEC.block_size_tokens)
  now_s = cluster.backend.now_s()
  request = Request(f'{now_s}', now_s, PROMPT, OUTPUT, keys, prompt)
  cluster.submit(
    request, Placement(request.request_id, 0, 'prefill0', 'decode0')
  )
  tokens, times_s, done_s, arrived_s = [], [], 0.0, 0.0
  while not cluster.idle:
    for event in cluster.step(None):
      if isinstance(event, TokensEmitted):
        tokens += event.emitted.tokens
        segment = event.emitted.segment
        times_s += [segment.first_s, segment.last_s]
      elif isinstance(event, PrefillDone):
        done_s = event.time_s
      elif isinstance(event, KVArrived):
        arrived_s = event.time_s
  assert len(tokens) == OUTPUT, tokens
  # From the second token on: what is before is the handoff's.
  tbt_s = (times_s[-1] - times_s[2]) / (OUTPUT - 2)
  return Life(times_s[0] - now_s, arrived_s - done_s, tbt_s, tuple(tokens))
