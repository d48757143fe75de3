# SPDX-License-Identifier: Apache-2.0
"""Logits of every model family against the reference implementation's.

tests/data/make_goldens.py made the checkpoints and what is expected of them.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model import forward
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.pages import gather_pages
from mooncake_jax.model.pages import init_pool
from mooncake_jax.model.pages import scatter_pages
from mooncake_jax.model.params import Params
from mooncake_jax.model.params import stack_layers
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model.sharding import make_mesh
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import Sampling

DATA = Path(__file__).parent / 'data'
FAMILIES = sorted(p.parent.name for p in DATA.glob('*/golden.npz'))
TOLERANCE = 1e-4
PAGE_TOKENS = 4
NUM_PAGES = 24
GREEDY = SamplingRows.of([Sampling()])


class Golden(NamedTuple):
  """A tiny checkpoint and what the reference implementation makes of it."""

  config: ModelConfig
  params: Params
  tokens_T: np.ndarray
  logits_TV: np.ndarray
  greedy_T: np.ndarray


@functools.cache
def golden(name: str) -> Golden:
  config, params = load_model(DATA / name)
  data = np.load(DATA / name / 'golden.npz')
  return Golden(config, params, data['tokens'], data['logits'], data['greedy'])


@functools.partial(jax.jit, static_argnames='config')
def all_logits(params, config, kv, tokens_T, pages_P, start, stop):
  """Logits [T, V] of the tokens at [start, stop), and the pool."""
  x_1TD = forward.embed(params, tokens_T[None])
  x_1TD, kv = forward.stage_fn(
    params['layers'], config, x_1TD, kv, pages_P[None], start[None], stop[None]
  )
  return forward.unembed(params, config, x_1TD[0]), kv


def pages(num_tokens: int, first: int = 1) -> np.ndarray:
  """Page table of the pages first, first + 1, ... of the pool."""
  count = -(-num_tokens // PAGE_TOKENS)
  return np.arange(first, first + count, dtype=np.int32)


def prefill(g: Golden, start: int, stop: int, kv, table_P, params=None):
  """Logits [stop - start, V], computed in one padded piece."""
  tokens_T = np.zeros_like(g.tokens_T)
  tokens_T[: stop - start] = g.tokens_T[start:stop]
  logits_TV, kv = all_logits(
    g.params if params is None else params,
    g.config,
    kv,
    tokens_T,
    table_P,
    np.int32(start),
    np.int32(stop),
  )
  return np.asarray(logits_TV)[: stop - start], kv


def pool(g: Golden, mesh=None) -> jax.Array:
  return init_pool(g.config, NUM_PAGES, PAGE_TOKENS, jnp.float32, mesh)


@pytest.mark.parametrize('name', FAMILIES)
def test_whole_prefill_gives_the_reference_logits(name):
  g = golden(name)
  n = len(g.tokens_T)
  logits_TV, _ = prefill(g, 0, n, pool(g), pages(n))
  assert np.abs(logits_TV - g.logits_TV).max() <= TOLERANCE


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('chunk', [7, 16, 1])
def test_chunks_give_the_reference_logits(name, chunk):
  g = golden(name)
  n, kv, parts = len(g.tokens_T), pool(g), []
  for start in range(0, n, chunk):
    stop = min(start + chunk, n)
    part, kv = prefill(g, start, stop, kv, pages(n))
    parts.append(part)
  assert np.abs(np.concatenate(parts) - g.logits_TV).max() <= TOLERANCE


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('reused', [16, 36])
def test_a_prefix_from_another_pool_gives_the_reference_logits(name, reused):
  g = golden(name)
  n, L = len(g.tokens_T), g.config.num_layers
  _, first = prefill(g, 0, reused, pool(g), pages(n))
  block = gather_pages(first, pages(reused), 0, L)
  table_P = pages(n, first=9)  # elsewhere in the second pool
  second, _ = scatter_pages(pool(g), table_P[: reused // PAGE_TOKENS], block)
  logits_TV, _ = prefill(g, reused, n, second, table_P)
  assert np.abs(logits_TV - g.logits_TV[reused:]).max() <= TOLERANCE


@pytest.mark.parametrize('name', ['mistral', 'qwen2', 'qwen3'])
def test_stacked_layers_give_the_reference_logits(name):
  g = golden(name)
  n = len(g.tokens_T)
  params = stack_layers(g.params)
  logits_TV, _ = prefill(g, 0, n, pool(g), pages(n), params)
  assert np.abs(logits_TV - g.logits_TV).max() <= TOLERANCE


@pytest.mark.parametrize(
  ('name', 'tensor'),
  [('llama_9_3', 3), ('qwen2', 2), ('qwen3', 4), ('llama3', 8)],
)
def test_tensor_parallel_gives_the_reference_logits(name, tensor):
  g = golden(name)
  n = len(g.tokens_T)
  mesh = make_mesh(jax.devices()[:tensor], g.config)
  with jax.set_mesh(mesh):
    _, params = load_model(DATA / name, mesh)
    logits_TV, _ = prefill(g, 0, n, pool(g, mesh), pages(n), params)
  assert np.abs(logits_TV - g.logits_TV).max() <= TOLERANCE


@pytest.mark.parametrize('name', ['mistral', 'qwen2', 'qwen3'])
def test_decoding_gives_the_reference_tokens(name):
  g = golden(name)
  n, count = len(g.tokens_T), len(g.greedy_T)
  table_P = pages(n + count)
  report_R, logits_V, kv = prefill_chunk(
    g.params,
    g.config,
    pool(g),
    g.tokens_T,
    table_P,
    np.int32(0),
    np.int32(n),
    GREEDY,
  )
  assert np.abs(np.asarray(logits_V) - g.logits_TV[-1]).max() <= TOLERANCE
  state = DecodeState(
    tokens_B=report_R[:1],
    positions_B=np.array([n], np.int32),
    active_B=np.array([True]),
    page_table_BP=table_P[None],
    sampling=GREEDY,
  )
  drawn = [int(report_R[0])]
  for _ in range(count - 1):
    state, _, kv = decode_step(g.params, g.config, kv, state)
    drawn.append(int(state.tokens_B[0]))
  assert drawn == g.greedy_T.tolist()
