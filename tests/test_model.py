# SPDX-License-Identifier: Apache-2.0
"""The forward pass: one answer whichever way it is computed."""

from dataclasses import replace

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from model_pieces import CONFIGS
from model_pieces import LLAMA
from model_pieces import make_mesh
from model_pieces import make_params
from model_pieces import make_prompt
from model_pieces import make_table
from model_pieces import PAGE_TOKENS
from model_pieces import reference_logits
from model_pieces import Runner
from mooncake_jax.model import forward
from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params

TOLERANCE = 1e-4
LENGTH = 75
BUCKET = 80
NUM_TABLE_PAGES = 20


def close(a, b):
  np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize('name', CONFIGS)
def test_prefill_equals_a_plain_reference(name):
  config = CONFIGS[name]
  tokens = make_prompt(config, LENGTH)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  logits_V = Runner(config).prefill(tokens, table_P, 0, LENGTH, BUCKET)
  close(logits_V, reference_logits(config, tokens)[-1])


@pytest.mark.parametrize('chunk', [1, 4, 7, 16, 31])
@pytest.mark.parametrize('name', ['llama', 'window'])
def test_chunked_equals_whole_for_any_chunk_size(name, chunk):
  config = CONFIGS[name]
  tokens = make_prompt(config, LENGTH)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  cuts = [*range(chunk, LENGTH, chunk), LENGTH]
  logits_V = Runner(config).chunked(tokens, table_P, cuts, bucket=32)
  close(logits_V, reference_logits(config, tokens)[-1])


@pytest.mark.parametrize('name', ['llama', 'window'])
@pytest.mark.parametrize('cuts', [(128, 256, 300), (100, 200, 299, 300)])
def test_prompts_longer_than_a_block_of_keys(name, cuts):
  config = CONFIGS[name]
  tokens = make_prompt(config, 300)
  table_P = make_table(300, 80)
  logits_V = Runner(config, num_pages=81).chunked(tokens, table_P, cuts, 128)
  close(logits_V, reference_logits(config, tokens)[-1])


@pytest.mark.parametrize('stop', [4, 36])
def test_a_prefix_moved_through_blocks_equals_whole(stop):
  tokens = make_prompt(LLAMA, LENGTH)
  here, there = Runner(LLAMA), Runner(LLAMA)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  other_P = make_table(LENGTH, NUM_TABLE_PAGES, seed=1)
  here.prefill(tokens, table_P, 0, LENGTH, BUCKET)
  n = stop // PAGE_TOKENS
  for start_layer in range(LLAMA.num_layers):
    block_L2SKH = pages.gather_pages(here.kv, table_P[:n], start_layer, 1)
    there.kv, _ = pages.scatter_pages(
      there.kv, other_P[:n], block_L2SKH, start_layer
    )
  logits_V = there.prefill(tokens, other_P, stop, LENGTH, BUCKET)
  close(logits_V, reference_logits(LLAMA, tokens)[-1])


@pytest.mark.parametrize('name', ['llama', 'qwen3', 'window'])
def test_decode_steps_equal_prefill_of_the_longer_prompt(name):
  config = CONFIGS[name]
  tokens = make_prompt(config, 140)
  table_P = make_table(140, 40)
  run = Runner(config)
  run.prefill(tokens, table_P, 0, 120, 128)
  expected_TV = reference_logits(config, tokens)
  for position in range(120, 140):
    logits_BV = run.decode_logits(
      {
        'tokens_B': tokens[None, position],
        'positions_B': np.array([position], np.int32),
        'active_B': np.array([True]),
        'page_table_BP': table_P[None],
      }
    )
    close(logits_BV[0], expected_TV[position])


def test_rows_of_a_batch_are_independent():
  lengths = [3, 60, 17]
  prompts = [make_prompt(LLAMA, n, seed=n) for n in lengths]
  run = Runner(LLAMA)
  rng = np.random.default_rng(0)
  used = 1 + rng.permutation(60).reshape(3, 20)  # no page in two tables
  table_BP = used.astype(np.int32)
  for prompt, table_P in zip(prompts, table_BP):
    run.prefill(prompt, table_P, 0, len(prompt) - 1, BUCKET)
  for active in ([1, 1, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0]):
    logits_BV = run.decode_logits(
      {
        'tokens_B': np.array([prompt[-1] for prompt in prompts]),
        'positions_B': np.array(lengths, np.int32) - 1,
        'active_B': np.array(active, bool),
        'page_table_BP': table_BP,
      }
    )
    assert np.isfinite(logits_BV).all()
    for row, prompt in enumerate(prompts):
      if active[row]:
        close(logits_BV[row], reference_logits(LLAMA, prompt)[-1])


def test_padding_leaves_other_pages_alone():
  run = Runner(LLAMA)
  run.kv = run.kv + 1
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  run.prefill(make_prompt(LLAMA, LENGTH), table_P, 0, 5, BUCKET)
  kv_LP2CKH = np.asarray(run.kv)
  written = [0, *table_P[:2]]
  assert (np.delete(kv_LP2CKH, written, axis=1) == 1).all()
  assert (kv_LP2CKH[:, table_P[1], :, 1:] == 1).all()


@pytest.mark.parametrize('name', ['llama', 'qwen2'])
def test_stacked_layers_give_the_same_numbers(name):
  config = CONFIGS[name]
  tokens = make_prompt(config, LENGTH)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  stacked = model_params.stack_layers(make_params(config))
  run = Runner(config, params=stacked)
  logits_V = run.chunked(tokens, table_P, (40, LENGTH), BUCKET)
  close(logits_V, reference_logits(config, tokens)[-1])
  again = model_params.unstack_layers(stacked)['layers']
  for layer, same in zip(make_params(config)['layers'], again):
    for name in layer:
      assert (layer[name] == same[name]).all()


def test_materialized_unembedding_gives_the_same_numbers():
  config = CONFIGS['smollm2']
  tokens = make_prompt(config, LENGTH)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  params = model_params.materialize_unembed(make_params(config))
  run = Runner(config, params=params)
  logits_V = run.prefill(tokens, table_P, 0, LENGTH, BUCKET)
  close(logits_V, reference_logits(config, tokens)[-1])


def test_a_window_no_shorter_than_the_prompt_changes_nothing():
  tokens = make_prompt(LLAMA, LENGTH)
  wide = replace(LLAMA, sliding_window=LENGTH)
  table_P = make_table(LENGTH, NUM_TABLE_PAGES)
  logits_V = Runner(wide).prefill(tokens, table_P, 0, LENGTH, BUCKET)
  close(logits_V, reference_logits(LLAMA, tokens)[-1])


def test_stages_one_after_the_other_equal_whole():
  tokens = make_prompt(LLAMA, LENGTH)
  table_1P = make_table(LENGTH, NUM_TABLE_PAGES)[None]
  params = make_params(LLAMA)
  start_1, stop_1 = np.array([0], np.int32), np.array([LENGTH], np.int32)
  x_1TD = forward.embed(params, jnp.asarray(tokens[None]))
  for stage in range(LLAMA.num_layers):
    kv = pages.init_pool(
      LLAMA, 30, PAGE_TOKENS, mesh=make_mesh(LLAMA), num_layers=1
    )
    layers = model_params.slice_layers(params['layers'], stage, stage + 1)
    x_1TD, _ = jax.jit(forward.stage_fn, static_argnums=1)(
      layers, LLAMA, x_1TD, kv, table_1P, start_1, stop_1
    )
  logits_TV = forward.unembed(params, LLAMA, x_1TD[0])
  close(logits_TV, reference_logits(LLAMA, tokens))
