# SPDX-License-Identifier: Apache-2.0
"""Served tokens are the model's own, whatever way a request went.

Whole = chunked = reused prefix = disaggregated = tensor parallel, up to a
step whose top-2 logit gap is below 1e-3: there the order of sums decides.
"""

from dataclasses import replace
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LOOSE
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import InstanceSizes
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model import forward
from mooncake_jax.model.pages import init_pool
from mooncake_jax.model.params import init_params
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling
from mooncake_jax.serve import serve
from scripts.device import instance_specs

LENGTH = 96
OUTPUT = 10
GAP = 1e-3
HEADS = {'8/4': (8, 4), '8/2': (8, 2), '9/3': (9, 3)}


def config_of(heads: str) -> ModelConfig:
  num_heads, num_kv_heads = HEADS[heads]
  return ModelConfig(
    'llama',
    vocab_size=96,
    model_dim=48,
    mlp_dim=96,
    num_layers=3,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=8,
    max_tokens=96,
  )


@functools.cache
def params_of(heads: str):
  return init_params(config_of(heads), jax.random.key(1))


@functools.partial(jax.jit, static_argnames='config')
def _all_logits(params, config, tokens_T):
  """Logits [T, V] of one whole prompt, in one go and in its own pool."""
  num_pages = LENGTH // 16 + 1
  kv = init_pool(config, num_pages, 16, jnp.float32)
  x_1TD, _ = forward.stage_fn(
    params['layers'],
    config,
    forward.embed(params, tokens_T[None]),
    kv,
    jnp.arange(1, num_pages, dtype=jnp.int32)[None],
    jnp.zeros(1, jnp.int32),
    jnp.full(1, LENGTH, jnp.int32),
  )
  return forward.unembed(params, config, x_1TD[0])


@functools.cache
def plain(heads: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
  """Greedy tokens by whole forward passes, as far as the gap decides."""
  tokens = list(prompt)
  for _ in range(OUTPUT):
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    logits_V = np.asarray(
      _all_logits(params_of(heads), config_of(heads), padded)
    )[len(tokens) - 1]
    second, first = np.sort(logits_V)[-2:]
    if first - second < GAP:
      break
    tokens.append(int(np.argmax(logits_V)))
  return tuple(tokens[len(prompt) :])


def prompts() -> list[tuple[int, ...]]:
  """A shared prefix of 40 tokens, tails of 0 to 23, and one short prompt."""
  rng = np.random.default_rng(5)
  head = rng.integers(2, 96, 40)
  tails = [rng.integers(2, 96, n) for n in (0, 1, 8, 15, 23)]
  made = [np.concatenate([head, tail]) for tail in tails]
  return [tuple(p.tolist()) for p in [*made, made[2], head[:3]]]


def serve_all(heads: str, spec, requests):
  """Records of all requests served twice, the second time 0.5 s later."""
  config = config_of(heads)
  backend = DeviceBackend(
    config, spec.layout(config), instance_specs(spec, config), params_of(heads)
  )
  with backend:
    warmup(backend)
    programs = backend.compiled_programs()
    conductor = Conductor(
      ConductorSpec(balancing_threshold=1.0), spec, config, COSTS, LOOSE
    )
    cluster = Cluster(spec, config, backend)
    records, _ = serve(requests, conductor, cluster)
    assert backend.compiled_programs() == programs, 'it compiled again'
    cluster.check()
    assert cluster.idle
  return records


CASES = {
  'two of each': ('8/4', {}),
  'whole prompts': ('8/4', {'chunk_tokens': 64}),
  'chunks across blocks': ('8/4', {'chunk_tokens': 5}),
  'chunks of a block': ('8/4', {'chunk_tokens': 8}),
  'one layer a transfer': ('8/2', {'layers_per_transfer': 1}),
  'no reuse': ('8/4', {'reuse': False}),
  'a store of four blocks': ('8/2', {'host_bytes': 4 * 8 * 3 * 128}),
  'prefixes stay on the device': ('8/4', {'device_cache_tokens': 96}),
  'one row at a time': ('8/2', {'max_batch': 1, 'decode_pool_tokens': 96}),
  'two devices each': ('8/4', {'tensor_parallel': 2}),
  'two devices, two KV heads': ('8/2', {'tensor_parallel': 2}),
  'four devices': (
    '8/4',
    {'tensor_parallel': 4, 'prefill_instances': 1, 'decode_instances': 1},
  ),
  'four devices share two KV heads': (
    '8/2',
    {'tensor_parallel': 4, 'prefill_instances': 1, 'decode_instances': 1},
  ),
  'one, two and four devices': (
    '8/2',
    {
      'instances': {
        'prefill1': InstanceSizes(tensor_parallel=2, prefill_pool_tokens=128),
        'decode0': InstanceSizes(tensor_parallel=4, max_batch=1),
      }
    },
  ),
  'two that do both': ('8/4', {'colocated': True, 'streaming': 'chunks'}),
  'three devices': (
    '9/3',
    {'tensor_parallel': 3, 'prefill_instances': 1, 'decode_instances': 1},
  ),
}


@pytest.mark.parametrize('heads,kwargs', CASES.values(), ids=CASES)
def test_served_tokens_are_the_models_own(heads, kwargs):
  spec = replace(SPEC, **{'max_tokens': 96, 'max_batch': 2, **kwargs})
  requests = [
    make_request(f'{turn}.{i}', prompt, OUTPUT, 0.5 * turn)
    for turn in range(2)
    for i, prompt in enumerate(prompts())
  ]
  records = serve_all(heads, spec, requests)
  for record, prompt in zip(records, prompts() * 2):
    assert record.outcome == 'completed', record
    expected = plain(heads, prompt)
    assert tuple(record.output_tokens[: len(expected)]) == expected, record
  # The gap leaves enough to compare.
  assert sum(len(plain(heads, prompt)) for prompt in prompts()) >= 30
  reused = sum(sum(r.reused_tokens.values()) for r in records)
  assert (reused > 0) == spec.reuse


@pytest.mark.parametrize('tensor_parallel', [2, 4])
def test_heads_that_do_not_divide_are_a_clear_error(tensor_parallel):
  spec = replace(
    SPEC,
    tensor_parallel=tensor_parallel,
    prefill_instances=1,
    decode_instances=1,
  )
  with pytest.raises(ValueError, match='num_kv_heads=3'):
    serve_all('9/3', spec, [])


def test_drawn_tokens_depend_on_the_seed_and_not_on_the_schedule():
  """One after another or all at once: the same draws."""
  spec = replace(SPEC, max_tokens=96)
  draws = []
  for every_s in (0.0, 0.2):
    requests = [
      make_request(
        f'r{i}',
        prompt,
        OUTPUT,
        every_s * i,
        sampling=Sampling(1.0, 20, 0.9, seed=i),
      )
      for i, prompt in enumerate(prompts()[:4])
    ]
    records = serve_all('8/4', spec, requests)
    draws.append([r.output_tokens for r in records])
  assert draws[0] == draws[1]
  assert len({tuple(d) for d in draws[0]}) == 4


def test_a_stop_token_is_the_last_one():
  spec = replace(SPEC, max_tokens=96)
  prompt = prompts()[3]
  whole = plain('8/4', prompt)
  stop = whole[4]
  request = make_request('r', prompt, OUTPUT, stop_token_ids=(stop,))
  (record,) = serve_all('8/4', spec, [request])
  assert tuple(record.output_tokens) == whole[: whole.index(stop) + 1]
