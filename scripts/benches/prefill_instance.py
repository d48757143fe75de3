# SPDX-License-Identifier: Apache-2.0
"""Prefill instances with random weights, and prompts through them."""

from collections.abc import Mapping
from collections.abc import Sequence

import jax
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.costs.chunks import chunk_stops
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model import params
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling
from scripts.measure import ended

PAGE_TOKENS = 64
ONE_STAGE: Mapping[str, tuple[int, ...]] = {'prefill0': ()}


def prefill_backend(
  config: ModelConfig,
  max_tokens: int,
  chunks: Sequence[int],
  stage_layers: Mapping[str, tuple[int, ...]] = ONE_STAGE,
) -> DeviceBackend:
  """Instances by name with the layers of their stages; a program a chunk size.

  Each holds one prompt of `max_tokens`.
  """
  layout = KVLayout(
    config.num_layers,
    2 * config.num_kv_heads * config.head_dim * 4,
    PAGE_TOKENS,
    PAGE_TOKENS,
    config.num_layers,
  )
  instances = [
    InstanceSpec(
      name,
      'prefill',
      num_pages=1 + layout.pages_for(max_tokens),
      max_tokens=max_tokens,
      chunk_buckets=tuple(chunks),
      stage_layers=layers,
      unroll=False,
    )
    for name, layers in stage_layers.items()
  ]
  made = params.init_params(config, jax.random.key(0))
  return DeviceBackend(config, layout, instances, made)


def prefill_chunks(
  backend: DeviceBackend,
  start: int,
  stop: int,
  chunk: int,
  instance: str = 'prefill0',
) -> list[Completion]:
  """Tokens [start, stop) of a prompt, all chunks given at once."""
  pages = tuple(range(1, 1 + backend.layout.pages_for(stop)))
  stops = chunk_stops(None, stop, start, chunk, 'fixed')
  for first, last in zip((start, *stops), stops):
    ids = np.arange(first, last, dtype=np.int32)
    sampling = Sampling() if last == stop else None
    work = PrefillChunk('bench', 0, first, last, pages, ids, sampling)
    backend.prefill(instance, work)
  return ended(backend)
