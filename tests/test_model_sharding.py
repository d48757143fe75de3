# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in explicit sharding: same logits, clear refusals."""

from dataclasses import replace

import jax
from jax.sharding import AxisType
import numpy as np
import pytest

from model_pieces import CONFIGS
from model_pieces import LLAMA
from model_pieces import make_mesh
from model_pieces import make_params
from model_pieces import make_prompt
from model_pieces import make_table
from model_pieces import reference_logits
from model_pieces import Runner
from mooncake_jax.blocks.accounting import weight_bytes
from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params
from mooncake_jax.model import sharding

LENGTH = 30
TENSORS = [
  ('llama', 2),  # 8 query heads, 4 KV heads
  ('llama', 4),
  ('llama', 8),
  ('llama3', 2),  # 2 KV heads
  ('llama3', 4),
  ('qwen2', 4),  # tied, biases
  ('smollm2', 3),  # 9 and 3
]


@pytest.mark.parametrize(('name', 'tensor'), TENSORS)
def test_tensor_parallel_gives_the_same_logits(name, tensor):
  config = CONFIGS[name]
  tokens = make_prompt(config, LENGTH)
  table_P = make_table(LENGTH, 8)
  run = Runner(config, tensor)
  assert set(run.mesh.axis_types) == {AxisType.Explicit}
  logits_V = run.chunked(tokens, table_P, (13, LENGTH - 1), 16)
  expected_TV = reference_logits(config, tokens)
  np.testing.assert_allclose(logits_V, expected_TV[-2], atol=1e-4, rtol=0)
  logits_BV = run.decode_logits(
    {
      'tokens_B': tokens[None, -1],
      'positions_B': np.array([LENGTH - 1], np.int32),
      'active_B': np.array([True]),
      'page_table_BP': table_P[None],
    }
  )
  np.testing.assert_allclose(logits_BV[0], expected_TV[-1], atol=1e-4, rtol=0)


def test_kv_heads_are_split_and_then_copied():
  config = CONFIGS['llama3']
  run = Runner(config, tensor=4)
  assert dict(run.mesh.shape) == {'kv': 2, 'group': 2}
  shapes = {shard.data.shape[4] for shard in run.kv.addressable_shards}
  assert shapes == {1}
  wq_DKGH = run.params['layers'][0]['wq']
  assert wq_DKGH.addressable_shards[0].data.shape == (32, 1, 2, 8)


@pytest.mark.parametrize('tensor', [2, 4])
def test_heads_that_do_not_divide_are_a_clear_error(tensor):
  with pytest.raises(ValueError) as error:
    make_mesh(CONFIGS['smollm2'], tensor)
  for word in (f'{tensor=}', 'num_heads=9', 'num_kv_heads=3'):
    assert word in str(error.value)


def test_what_does_not_divide_is_copied():
  config = replace(LLAMA, mlp_dim=50, vocab_size=97)
  mesh = make_mesh(config, 4)
  placed = model_params.param_shardings(config, mesh)
  assert placed['embed'].is_fully_replicated
  assert placed['layers'][0]['w_up'].is_fully_replicated
  assert not placed['layers'][0]['wk'].is_fully_replicated


def test_random_weights_do_not_depend_on_the_mesh():
  key = jax.random.key(7)
  plain = model_params.init_params(LLAMA, key)
  split = model_params.init_params(LLAMA, key, mesh=make_mesh(LLAMA, 4))
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(split)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize('name', ['qwen2', 'qwen3', 'smollm2'])
def test_one_declaration_three_uses(name):
  config = CONFIGS[name]
  mesh = make_mesh(config, 1)
  abstract = model_params.abstract_params(config, mesh=mesh)
  params = model_params.init_params(config, jax.random.key(0), mesh=mesh)
  placed = model_params.param_shardings(config, mesh)
  same = lambda a, p, s: (  # noqa: E731
    a.shape == p.shape and a.sharding == p.sharding == s
  )
  assert all(jax.tree.leaves(jax.tree.map(same, abstract, params, placed)))
  num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
  assert num_params == config.num_params


@pytest.mark.parametrize(('name', 'tensor'), TENSORS)
def test_counted_weight_bytes_are_those_of_a_device(name, tensor):
  config = CONFIGS[name]
  params = make_params(config, tensor)
  on_device = sum(
    leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)
  )
  assert on_device == weight_bytes(config, 4, tensor)


def test_blocks_of_any_mesh_have_the_same_bytes():
  tokens = make_prompt(LLAMA, LENGTH)
  table_P = make_table(LENGTH, 8)
  blocks = []
  for tensor in (1, 4):
    run = Runner(LLAMA, tensor)
    run.prefill(tokens, table_P, 0, LENGTH, 32)
    block_L2SKH = pages.gather_pages(run.kv, table_P[:6], 0, 2)
    placed = pages.block_sharding(LLAMA, run.mesh)
    assert block_L2SKH.sharding.is_equivalent_to(placed, 5)
    blocks.append(np.asarray(block_L2SKH))
  np.testing.assert_allclose(*blocks, atol=1e-5)
  one = Runner(LLAMA, 1)
  placed = jax.device_put(blocks[1], pages.block_sharding(LLAMA, one.mesh))
  one.kv, _ = pages.scatter_pages(one.kv, table_P[:6], placed)
  again_L2SKH = pages.gather_pages(one.kv, table_P[:6], 0, 2)
  np.testing.assert_array_equal(blocks[1], np.asarray(again_L2SKH))


def test_placed_arrays_have_the_sharding_steps_return():
  mesh = make_mesh(LLAMA, 2)
  tree = sharding.place({'a': np.zeros((2, 3)), 'b': np.int32(1)}, mesh)
  f = jax.jit(lambda a, w: jax.tree.map(lambda x: x + 0 * w, a))
  w = jax.device_put(np.float32(1), sharding.named_sharding(mesh, '', ()))
  out = f(tree, w)
  assert out['a'].sharding == tree['a'].sharding
