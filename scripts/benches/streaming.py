# SPDX-License-Identifier: Apache-2.0
"""How much of a handoff's time streaming hides behind prefill.

The link into the decode instance is slowed down until all KVCache of a prompt
takes half as long over it as the prompt takes to prefill. Serialized, that
time comes on top; what is left of it after the last chunk's end is exposed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
import itertools
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.cluster_spec import Streaming
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.model import params
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from scripts.benches.model import CONFIG
from scripts.benches.rows import Row
from scripts.device import instance_specs

SPEC = ClusterSpec(
  prefill_instances=1,
  decode_instances=1,
  max_tokens=2048,
  prefill_pool_tokens=2048,
  decode_pool_tokens=2048,
  layers_per_transfer=3,
  host_bytes=0,
  reuse=False,
)
SHARE = 0.5  # of prefill, that the handoff takes on the link
# (name, chunks, tokens of one, stages, limit of what may be exposed)
CASES = (
  ('16_chunks', 16, 64, 1, 0.15),
  ('16_chunks_2_stages', 16, 64, 2, 0.15),
  ('1_chunk', 1, 512, 1, 0.2),
)
MODES: tuple[Streaming, ...] = ('prompt', 'chunks', 'layers')


class Life(NamedTuple):
  """When a prompt began, was prefilled, and had arrived."""

  begun_s: float
  prefilled_s: float
  arrived_s: float


def streaming(quick: bool) -> list[Row]:
  """Exposed shares by case and mode."""
  return [
    row
    for name, chunks, tokens, stages, limit in CASES
    for row in _case(name, chunks * tokens, tokens, stages, limit, quick)
  ]


def _case(
  name: str, prompt: int, chunk: int, stages: int, limit: float, quick: bool
) -> list[Row]:
  spec = replace(SPEC, chunk_tokens=chunk, stages=stages)
  with _backend(spec) as backend:
    clusters = {
      mode: Cluster(replace(spec, streaming=mode), CONFIG, backend)
      for mode in MODES
    }
    ids = itertools.count()
    runs = [_serve(clusters['prompt'], prompt, next(ids)) for _ in range(3)]
    compute_s = min(r.prefilled_s - r.begun_s for r in runs)
    link_s = SHARE * compute_s
    num_bytes = prompt * spec.layout(CONFIG).token_layer_bytes
    rate = num_bytes * CONFIG.num_layers / link_s
    backend.instances['decode0'].device_link.pace(rate)
    lives: dict[str, list[Life]] = {mode: [] for mode in MODES}
    for _ in range(3 if quick else 9):
      for mode, cluster in clusters.items():
        lives[mode].append(_serve(cluster, prompt, next(ids)))
  return [
    Row(f'streaming.{name}.prefill_s', compute_s, 's', 'nothing on the link'),
    Row(f'streaming.{name}.link_s', link_s, 's', f'{rate / 1e6:.3g} MB/s'),
    *(
      row
      for mode in MODES
      for row in _rows(f'streaming.{name}.{mode}', lives[mode], link_s, limit)
    ),
  ]


def _rows(
  name: str, lives: list[Life], link_s: float, limit: float
) -> list[Row]:
  tail_s = median(r.arrived_s - r.prefilled_s for r in lives)
  prefill_s = median(r.prefilled_s - r.begun_s for r in lives)
  streams = name.endswith('layers')
  return [
    Row(
      f'{name}.exposed',
      tail_s / link_s,
      'ratio',
      'from the last chunk to the last bytes, of the time on the link',
      target=limit if streams else None,
      at_most=True,
    ),
    Row(f'{name}.prefill_s', prefill_s, 's', 'while the link is busy'),
  ]


def _serve(cluster: Cluster, num_tokens: int, number: int) -> Life:
  prompt = np.random.default_rng(number).integers(
    0, CONFIG.vocab_size, num_tokens, dtype=np.int32
  )
  name, now_s = str(number), cluster.backend.now_s()
  keys = prefix_keys(prompt, SPEC.block_size_tokens)
  request = Request(name, now_s, num_tokens, 2, keys, prompt)
  cluster.submit(request, Placement(name, 0, 'prefill0', 'decode0'))
  begun_s = prefilled_s = arrived_s = 0.0
  while not cluster.idle:
    for event in cluster.step(None):
      if isinstance(event, PrefillDone):
        begun_s, prefilled_s = event.started_s, event.time_s
      elif isinstance(event, KVArrived):
        arrived_s = event.time_s
  return Life(begun_s, prefilled_s, arrived_s)


@contextmanager
def _backend(spec: ClusterSpec) -> Iterator[DeviceBackend]:
  made = params.materialize_unembed(
    params.init_params(CONFIG, jax.random.key(0))
  )
  with DeviceBackend(
    CONFIG, spec.layout(CONFIG), instance_specs(spec, CONFIG), made
  ) as backend:
    warmup(backend)
    yield backend
