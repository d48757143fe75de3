# SPDX-License-Identifier: Apache-2.0
"""Prefill by one instance of the engine, and matrix products, in turns.

python -m scripts.benches.prefill_turns '{"threads": 1, "config": {...}, ...}'

Runs in a process of its own, as the number of threads is one of a process.
"""

from collections.abc import Sequence
import json
import sys
from typing import Any

import numpy as np

from scripts.peers.turns import Child

PAGE_TOKENS = 64


def main(
  threads: int, config: dict[str, Any], chunks: Sequence[int], max_tokens: int
) -> None:
  child = Child(threads)
  import jax

  from mooncake_jax.model_config import ModelConfig
  from scripts.benches import limits
  from scripts.device import start_jax

  start_jax(num_devices=1)
  shape = ModelConfig.from_hf(config)
  with backend_of(shape, max_tokens, tuple(chunks)) as backend:

    def prefill(start: int, stop: int, chunk: int) -> None:
      prefill_chunks(backend, start, stop, chunk)

    works = {'prefill': prefill, 'gemm': limits.gemm}
    child.answer(works, f'mooncake_jax, jax {jax.__version__}')


def backend_of(config, max_tokens: int, chunks: tuple[int, ...]):
  """One prefill instance with random weights, a program a chunk size."""
  import jax

  from mooncake_jax.blocks.layout import KVLayout
  from mooncake_jax.engine.device import DeviceBackend
  from mooncake_jax.engine.spec import InstanceSpec
  from mooncake_jax.model import params

  layout = KVLayout(
    config.num_layers,
    2 * config.num_kv_heads * config.head_dim * 4,
    PAGE_TOKENS,
    PAGE_TOKENS,
    config.num_layers,
  )
  spec = InstanceSpec(
    'prefill0',
    'prefill',
    num_pages=1 + layout.pages_for(max_tokens),
    max_tokens=max_tokens,
    chunk_buckets=chunks,
    unroll=False,
  )
  made = params.init_params(config, jax.random.key(0))
  return DeviceBackend(config, layout, [spec], made)


def prefill_chunks(backend, start: int, stop: int, chunk: int) -> None:
  """Tokens [start, stop) of a prompt, in chunks as serving gives them."""
  from mooncake_jax.backend import PrefillChunk
  from mooncake_jax.costs.chunks import chunk_stops
  from mooncake_jax.request import Sampling
  from scripts.measure import ended

  pages = tuple(range(1, 1 + backend.layout.pages_for(stop)))
  stops = chunk_stops(None, stop, start, chunk, 'fixed')
  for first, last in zip((start, *stops), stops):
    ids = np.arange(first, last, dtype=np.int32)
    sampling = Sampling() if last == stop else None
    work = PrefillChunk('bench', 0, first, last, pages, ids, sampling)
    backend.prefill('prefill0', work)
  ended(backend)


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))
