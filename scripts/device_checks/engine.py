# SPDX-License-Identifier: Apache-2.0
"""The engine on the device: blocks through the store, requests, stages."""

from collections.abc import Callable
import time

import jax
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spec import Role
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.model.params import init_params
from mooncake_jax.request import Request
from mooncake_jax.request import Sampling
from mooncake_jax.serve import serve
from mooncake_jax.slo import SLO
from scripts.device_checks.part import Budget
from scripts.device_checks.part import Figures
from scripts.device_checks.shapes import Sizes

PAGE_TOKENS = 64
BLOCK_TOKENS = 128
REPEATS = 4
WAIT_S = 60.0
# A guess: nothing is rejected, so only ties between instances hang on it.
COSTS = PolynomialCost(
  prefill_base_s=1e-3,
  prefill_s_per_prefix_token=1e-7,
  prefill_s_per_token=1e-5,
  prefill_s_per_token_squared=1e-9,
  decode_base_s=1e-3,
  decode_s_per_row=1e-5,
  decode_s_per_context_token=1e-8,
  onload_bytes_per_s=1e10,
  onload_latency_s=1e-4,
  offload_bytes_per_s=1e10,
  offload_latency_s=1e-4,
  copy_bytes_per_s=1e10,
  copy_latency_s=1e-4,
  handoff_bytes_per_s=1e10,
  handoff_latency_s=1e-4,
)


def store(sizes: Sizes, figures: Figures, budget: Budget) -> None:
  """Offload and onload of blocks, device <-> pinned host, through the store."""
  config = sizes.small
  itemsize = jax.numpy.dtype(sizes.dtype).itemsize
  token_bytes = 2 * config.num_kv_heads * config.head_dim * itemsize
  layout = KVLayout(
    config.num_layers, token_bytes, PAGE_TOKENS, 512, config.num_layers
  )
  count = max(sizes.bytes // layout.block_bytes, 2)
  spec = _instance('a', 'prefill', 1 + count * layout.pages_per_block, sizes)
  with _backend(sizes, layout, [spec]) as backend:
    blocks = [
      tuple(range(1 + i * 8, 9 + i * 8)) for i in range(count)
    ]  # 8 pages a block
    taken: dict[str, list[float]] = {'offload': [], 'onload': []}
    for turn in range(REPEATS):
      for way, seconds in taken.items():
        ops = _ops(layout, blocks, turn, way == 'offload')
        start_s = time.perf_counter()
        backend.transfer(ops, 0, backend.now_s() + WAIT_S)
        _all_completed(backend.wait)
        seconds.append(time.perf_counter() - start_s)
      backend.drop(tuple(_replicas(count, turn)))
  moved = count * layout.block_bytes
  figures['bytes'] = moved
  for way, seconds in taken.items():
    figures[f'{way}_bytes_per_s'] = moved / min(seconds)


def _ops(
  layout: KVLayout, blocks: list[tuple[int, ...]], turn: int, is_out: bool
) -> tuple[TransferOp, ...]:
  ops = []
  for pages, replica in zip(blocks, _replicas(len(blocks), turn)):
    device = DevicePages('a', pages)
    ends = (device, replica) if is_out else (replica, device)
    layers = (0, layout.num_layers)
    ops.append(TransferOp(*ends, *layers, layout.block_bytes))
  return tuple(ops)


def _replicas(count: int, turn: int) -> list[Replica]:
  return [Replica('a', turn * count + i) for i in range(count)]


def served(sizes: Sizes, figures: Figures, budget: Budget) -> None:
  """Prompts with a common half, served with reuse and without.

  The tokens are the same; only what is computed differs.
  """
  config = sizes.small
  spec = ClusterSpec(
    prefill_instances=1,
    decode_instances=1,
    block_size_tokens=BLOCK_TOKENS,
    page_tokens=PAGE_TOKENS,
    chunk_tokens=256,
    prefill_pool_tokens=4096,
    decode_pool_tokens=16384,
    max_tokens=1024,
    kv_dtype=sizes.dtype,
  )
  instances = [
    _instance('prefill0', 'prefill', spec.prefill_pages, sizes),
    _instance('decode0', 'decode', spec.decode_pages, sizes),
  ]
  tokens = []
  with _backend(sizes, spec.layout(config), instances) as backend:
    figures['warmup_s'] = warmup(backend)
    for reuse in (False, True):
      backend.restart_clock()
      found, told = _serve(spec, reuse, sizes, backend)
      figures['reuse' if reuse else 'no_reuse'] = found
      tokens.append(told)
  same = sum(a == b for a, b in zip(*tokens))
  figures['same_tokens_share'] = same / len(tokens[0])


def _serve(spec: ClusterSpec, reuse: bool, sizes: Sizes, backend):
  from dataclasses import replace

  config, slo = sizes.small, SLO(60.0, 10.0)
  spec = replace(spec, reuse=reuse)
  rules = ConductorSpec(admission='none')
  conductor = Conductor(rules, spec, config, COSTS, slo)
  cluster = Cluster(spec, config, backend, costs=COSTS)
  records, _ = serve(_requests(sizes), conductor, cluster)
  summary = summarize(records, slo)
  assert summary.completed == len(records), [r.reason for r in records]
  span_s = max(r.finished_s or 0.0 for r in records)
  found = {
    'hit_rate': summary.hit_rate,
    'ttft_s': summary.ttft_s,
    'tokens_per_s': sum(r.num_output_tokens for r in records) / span_s,
  }
  return found, [tuple(r.output_tokens) for r in records]


def _requests(sizes: Sizes) -> list[Request]:
  rng = np.random.default_rng(0)
  vocab = sizes.small.vocab_size
  common = rng.integers(0, vocab, 2 * BLOCK_TOKENS)
  requests = []
  for i in range(sizes.prompts):
    own = rng.integers(0, vocab, int(rng.integers(32, 2 * BLOCK_TOKENS)))
    prompt = np.concatenate([common, own]).astype(np.int32)
    keys = prefix_keys(prompt, BLOCK_TOKENS)
    name = f'request{i}'
    requests.append(Request(name, 0.05 * i, len(prompt), 16, keys, prompt))
  return requests


def stages(sizes: Sizes, figures: Figures, budget: Budget) -> None:
  """Chunked pipeline prefill over several devices against one of them."""
  num_stages = min(len(jax.devices()), 4, sizes.small.num_layers)
  if num_stages < 2:
    figures['skipped'] = 'one device'
    return
  config = sizes.small
  itemsize = jax.numpy.dtype(sizes.dtype).itemsize
  token_bytes = 2 * config.num_kv_heads * config.head_dim * itemsize
  num_layers = config.num_layers
  layout = KVLayout(num_layers, token_bytes, PAGE_TOKENS, 64, num_layers)
  length = 8 * 64 if num_layers < 8 else 4096
  share, over = divmod(num_layers, num_stages)
  layers = tuple(share + (i < over) for i in range(num_stages))
  tokens = {}
  for name, cut in (('one', ()), ('stages', layers)):
    pages = 1 + layout.pages_for(length)
    spec = _instance('a', 'prefill', pages, sizes, length, cut)
    with _backend(sizes, layout, [spec]) as backend:
      warmup(backend)
      times = [_prefill(backend, layout, length) for _ in range(REPEATS)]
    figures[f'{name}.prefill_s'] = min(seconds for seconds, _ in times)
    tokens[name] = times[0][1]
  figures['num_stages'] = num_stages
  figures['same_token'] = tokens['one'] == tokens['stages']


def _prefill(
  backend: DeviceBackend, layout: KVLayout, length: int
) -> tuple[float, int | None]:
  """Seconds of one prompt in eight chunks, and its first token."""
  pages = tuple(range(1, 1 + layout.pages_for(length)))
  ids = np.arange(length, dtype=np.int32) % 97
  start_s = time.perf_counter()
  for start in range(0, length, length // 8):
    stop = start + length // 8
    last = Sampling() if stop == length else None
    backend.prefill(
      'a', PrefillChunk('r', 0, start, stop, pages, ids[start:stop], last)
    )
  ended = _all_completed(backend.wait)
  seconds = time.perf_counter() - start_s
  return seconds, next(c.token for c in ended if c.token is not None)


def _all_completed(
  wait: Callable[[float | None], list[Completion]],
) -> list[Completion]:
  ended = []
  while completions := wait(None):
    ended += completions
  for completion in ended:
    assert completion.status == 'completed', completion.error
  return ended


def _instance(
  name: str,
  role: Role,
  num_pages: int,
  sizes: Sizes,
  max_tokens: int = 1024,
  stage_layers: tuple[int, ...] = (),
) -> InstanceSpec:
  """On the first device, or on as many as it has stages."""
  devices = tuple(range(len(stage_layers) or 1))
  return InstanceSpec(
    name,
    role,
    num_pages,
    max_tokens,
    devices=devices,
    stage_layers=stage_layers,
    chunk_buckets=(64, 256) if max_tokens == 1024 else (max_tokens // 8,),
    max_batch=8,
    batch_buckets=(8,),
    host_bytes=4 * max(sizes.bytes, 1 << 28),
    staging_bytes=max(sizes.bytes // 4, 64 << 20),
    unroll=False,
  )


def _backend(
  sizes: Sizes, layout: KVLayout, instances: list[InstanceSpec]
) -> DeviceBackend:
  config = sizes.small
  params = init_params(config, jax.random.key(0), sizes.dtype)
  return DeviceBackend(config, layout, instances, params, kv_dtype=sizes.dtype)
