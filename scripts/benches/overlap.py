# SPDX-License-Identifier: Apache-2.0
"""What storing all of a prompt's blocks adds to its prefill.

Two clusters take turns on the same devices: one puts every block to the host
segment while the next chunks compute, one puts none. Prefill is from the start
of the first chunk to the end of the last, handoff to decode included in both.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
import itertools
from pathlib import Path
from statistics import median
import tempfile

import jax
import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.events import BlocksStored
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
  max_tokens=4096,
  prefill_pool_tokens=4096,
  decode_pool_tokens=4096,
  host_bytes=1 << 30,
)
ADDED = 0.05


def overlap(quick: bool) -> list[Row]:
  """Medians with and without, and the share added."""
  tokens, turns = (1024, 7) if quick else (3072, 9)
  made = params.materialize_unembed(
    params.init_params(CONFIG, jax.random.key(0))
  )
  with DeviceBackend(
    CONFIG, SPEC.layout(CONFIG), instance_specs(SPEC, CONFIG), made
  ) as backend:
    warmup(backend)
    prompts = Prompts(tokens)
    clusters = {
      'with': Cluster(SPEC, CONFIG, backend),
      'without': Cluster(replace(SPEC, reuse=False), CONFIG, backend),
    }
    times: dict[str, list[float]] = {name: [] for name in clusters}
    for turn in range(turns + 1):
      for name in [*clusters][:: 1 if turn % 2 else -1]:
        seconds, blocks = prompts.serve(clusters[name])
        assert blocks == (tokens // 128 if name == 'with' else 0), blocks
        if turn:
          times[name].append(seconds)
    shares = {
      name: copy_share(partial(prompts.serve, cluster))
      for name, cluster in clusters.items()
    }
  added = shares['with'] - shares['without']
  return [
    *_rows(tokens, {name: median(taken) for name, taken in times.items()}),
    Row(
      f'overlap.{tokens}_tokens.copies_added',
      added,
      'ratio',
      'of prefill, copies out of the pool in the profile of one prompt each',
      target=ADDED,
      at_most=True,
    ),
  ]


def _rows(tokens: int, taken: dict[str, float]) -> list[Row]:
  name = f'overlap.{tokens}_tokens'
  return [
    *(Row(f'{name}.{way}_puts.s', s, 's') for way, s in taken.items()),
    Row(
      f'{name}.added',
      taken['with'] / taken['without'] - 1,
      'ratio',
      'medians of alternating prompts, all blocks put',
      target=ADDED,
      at_most=True,
    ),
  ]


def copy_share(serve: Callable[[], tuple[float, int]]) -> float:
  """Copies out of the pool as a share of the prefill, by profiler annotations.

  They run on the thread that starts the next chunk, so their time adds to it.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      seconds, _ = serve()
    (copies_s,) = annotated_s(Path(folder), ('mooncake.copy_out',))
  return copies_s / seconds


def annotated_s(folder: Path, names: tuple[str, ...]) -> list[float]:
  """Seconds inside the annotations of each name in a profile."""
  (path,) = folder.glob('**/*.xplane.pb')
  total_ns = dict.fromkeys(names, 0.0)
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        if event.name in total_ns:
          total_ns[event.name] += event.duration_ns
  return [ns / 1e9 for ns in total_ns.values()]


class Prompts:
  """Random prompts of one length, no two alike."""

  def __init__(self, num_tokens: int):
    self._num_tokens = num_tokens
    self._draw = np.random.default_rng(0)
    self._ids = itertools.count()

  def serve(self, cluster: Cluster) -> tuple[float, int]:
    """Seconds of a prompt's prefill, and blocks stored when all is done."""
    name = str(next(self._ids))
    prompt = self._draw.integers(
      0, CONFIG.vocab_size, self._num_tokens, dtype=np.int32
    )
    keys = prefix_keys(prompt, SPEC.block_size_tokens)
    now_s = cluster.backend.now_s()
    request = Request(name, now_s, len(prompt), 1, keys, prompt)
    cluster.submit(request, Placement(name, 0, 'prefill0', 'decode0'))
    seconds, blocks = 0.0, 0
    while not cluster.idle:
      for event in cluster.step(None):
        if isinstance(event, PrefillDone):
          seconds = event.time_s - event.started_s
        if isinstance(event, BlocksStored):
          blocks += len(event.keys)
    return seconds, blocks
