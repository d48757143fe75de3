# SPDX-License-Identifier: Apache-2.0
"""The layout that runs: the same logits, fewer arrays, split as it should."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from engine_pieces import MODEL
from engine_pieces import tiny_params
from model_pieces import CONFIGS
from model_pieces import LLAMA
from model_pieces import make_mesh
from model_pieces import make_params
from model_pieces import make_prompt
from model_pieces import make_table
from model_pieces import reference_logits
from model_pieces import Runner
from mooncake_jax.engine.bound_step import BoundStep
from mooncake_jax.engine.weights import Weights
from mooncake_jax.model import fuse
from mooncake_jax.model import params as model_params
from mooncake_jax.model import quantize

LENGTH = 30


def fused(params, heads=True):
  return fuse.fuse(dict(params), heads)


def logits(config, tensor=1, params=None):
  run = Runner(config, tensor, params=params)
  tokens = make_prompt(config, LENGTH)
  return run.chunked(tokens, make_table(LENGTH, 8), (13, LENGTH), 32)


@pytest.mark.parametrize(
  ('name', 'tensor'),
  [('qwen2', 1), ('qwen3', 2), ('llama', 4), ('llama3', 4), ('smollm2', 3)],
)
@pytest.mark.parametrize('unroll', [True, False])
def test_fused_weights_give_the_reference_logits(name, tensor, unroll):
  config = CONFIGS[name]
  mesh = make_mesh(config, tensor)
  whole = [(0, config.num_layers)]
  (params,) = Weights(make_params(config)).on(mesh, unroll, whole)
  expected_V = reference_logits(config, make_prompt(config, LENGTH))[-1]
  found_V = logits(config, tensor, params)
  np.testing.assert_allclose(found_V, expected_V, atol=1e-4, rtol=0)


def test_a_device_has_the_projections_of_its_own_heads():
  config, mesh = LLAMA, make_mesh(LLAMA, 4)
  (params,) = Weights(make_params(config)).on(mesh, True, [(0, 1)])
  plain = make_params(config)['layers'][0]
  (layer,) = params['layers']
  for shard in layer['wqkv'].addressable_shards:
    k = shard.index[1].start
    wqkv_DMH = np.asarray(shard.data)[:, 0]
    np.testing.assert_array_equal(wqkv_DMH[:, :-2], plain['wq'][:, k])
    np.testing.assert_array_equal(wqkv_DMH[:, -2], plain['wk'][:, k])
    np.testing.assert_array_equal(wqkv_DMH[:, -1], plain['wv'][:, k])
  assert layer['w_gate_up'].addressable_shards[0].data.shape == (32, 2, 12)


def test_heads_with_copies_are_not_fused():
  config = CONFIGS['llama3']
  mesh = make_mesh(config, 4)
  (params,) = Weights(make_params(config)).on(mesh, True, [(0, 2)])
  assert {'wq', 'wk', 'wv', 'w_gate_up'} <= set(params['layers'][0])


@pytest.mark.parametrize('stacked', [True, False])
def test_int8_weights_fuse_as_others_do(stacked):
  params = make_params(LLAMA)
  params = model_params.stack_layers(params) if stacked else params
  small = quantize.quantize_weights(params)
  plain_V = logits(LLAMA, params=small)
  found_V = logits(LLAMA, params=fused(small))
  np.testing.assert_allclose(found_V, plain_V, atol=1e-4, rtol=0)


def test_a_loaded_tree_and_a_given_one_run_alike():
  mesh = make_mesh(LLAMA, 4)
  given = make_params(LLAMA)
  placed = model_params.param_shardings(LLAMA, mesh)
  groups = [(0, 1), (1, 2)]
  by_tree = Weights(given).on(mesh, False, groups)
  loaded = Weights(lambda mesh: jax.device_put(given, placed))
  by_load = loaded.on(mesh, False, groups)
  same = lambda a, b: (  # noqa: E731
    a.sharding.is_equivalent_to(b.sharding, a.ndim) and np.array_equal(a, b)
  )
  assert all(jax.tree.leaves(jax.tree.map(same, by_tree, by_load)))
  assert set(given['layers'][0]) >= {'wq', 'w_gate'}, 'the given one is intact'


def test_a_step_takes_four_arrays_a_layer():
  counts = []
  for num_layers in (2, 3):
    config = replace(MODEL, num_layers=num_layers)
    params = tiny_params()
    layers = (params['layers'][0],) * num_layers
    params = fused({**params, 'layers': layers})
    counts.append(BoundStep(params, config, 'jnp').num_arrays)
  assert counts[1] - counts[0] == 4
