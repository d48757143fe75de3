# SPDX-License-Identifier: Apache-2.0
"""A pipeline whose stages take a fixed time: what an executor adds to it.

Every stage's program naps in a host callback before it computes a tiny model,
so the makespan shows scheduling alone, on any machine: the devices simulated on
a CPU share its cores, and real stages there would only show that.
"""

import functools
import time

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.cluster_spec import Executor
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model.params import init_params
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.tick import STAGE
from mooncake_jax.model.tick import tick
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

NAME = 'pipe'
CHUNK_TOKENS = 4
DEADLINE_S = 120.0


def measure(
  executor: Executor, num_chunks: int, num_stages: int, stage_s: float
) -> list[tuple[tuple[float, float], ...]]:
  """When each stage began and ended each chunk, [chunk][stage], in seconds.

  The chunks are of one prompt, all started at once.
  """
  config = _config(num_stages)
  num_tokens = num_chunks * CHUNK_TOKENS
  spec = InstanceSpec(
    NAME,
    'prefill',
    num_pages=num_chunks + 1,
    max_tokens=num_tokens,
    chunk_buckets=(CHUNK_TOKENS,),
    stage_layers=(1,) * num_stages,
    executor=executor,
  )
  layout = KVLayout(num_stages, 64, CHUNK_TOKENS, CHUNK_TOKENS, num_stages)
  params = init_params(config, jax.random.key(0))
  with DeviceBackend(
    config, layout, [spec], params, prefill_programs=napping(stage_s)
  ) as backend:
    warmup(backend)
    return _run(backend, num_chunks)


def makespan_s(spans: list[tuple[tuple[float, float], ...]]) -> float:
  """From the start of the first chunk to the end of the last."""
  return spans[-1][-1][1] - spans[0][0][0]


def napping(seconds: float) -> PrefillPrograms:
  """Programs that nap on every stage that has a chunk, then compute."""

  def nap(zero):
    time.sleep(seconds)
    return zero

  def late(start):
    """`start`, once the nap is over."""
    shape = jax.ShapeDtypeStruct(start.shape, start.dtype)
    return start + jax.pure_callback(nap, shape, jnp.zeros_like(start))

  @functools.partial(jax.jit, static_argnames='config', donate_argnames='kv')
  def prefill(params, config, kv, x, table_P, start, *rest):
    return prefill_chunk(params, config, kv, x, table_P, late(start), *rest)

  def on_stage(start_Z, num_layers_Z):
    has_chunk = num_layers_Z[0] > 0
    return jax.lax.cond(has_chunk, late, lambda start: start, start_Z)

  @functools.partial(
    jax.jit, static_argnames=('config', 'size'), donate_argnames='kv'
  )
  def napped_tick(layers, config, kv, x, table, start_Z, length_Z, n_Z, size):
    by_stage = jax.sharding.PartitionSpec(STAGE)
    start_Z = jax.shard_map(on_stage, in_specs=by_stage, out_specs=by_stage)(
      start_Z, n_Z
    )
    return tick(layers, config, kv, x, table, start_Z, length_Z, n_Z, size)

  return PrefillPrograms(prefill, napped_tick)


def _config(num_layers: int) -> ModelConfig:
  return ModelConfig(
    'llama',
    vocab_size=16,
    model_dim=16,
    mlp_dim=16,
    num_layers=num_layers,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_tokens=1024,
  )


def _run(
  backend: DeviceBackend, num_chunks: int
) -> list[tuple[tuple[float, float], ...]]:
  pages = tuple(range(1, num_chunks + 1))
  tokens = np.zeros(CHUNK_TOKENS, np.int32)
  works = []
  for i in range(num_chunks):
    start, stop = i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS
    last = Sampling() if i == num_chunks - 1 else None
    chunk = PrefillChunk('r', 0, start, stop, pages, tokens, last)
    works.append(backend.prefill(NAME, chunk))
  spans = {}
  while len(spans) < num_chunks:
    ends = backend.wait(DEADLINE_S)
    if not ends:
      raise RuntimeError(f'the pipeline took longer than {DEADLINE_S:g} s')
    for end in ends:
      if end.status != 'completed':
        raise RuntimeError(f'a chunk of the pipeline failed: {end.error}')
      spans[end.work_id] = end.spans
  return [spans[work] for work in works]
