# SPDX-License-Identifier: Apache-2.0
"""The jitted steps: in place, compiled once, for every platform."""

from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from model_pieces import GREEDY
from model_pieces import LLAMA
from model_pieces import make_params
from model_pieces import make_prompt
from model_pieces import make_table
from model_pieces import normal
from model_pieces import PAGE_TOKENS
from model_pieces import Runner
from mooncake_jax.engine.bound_step import Batch
from mooncake_jax.engine.bound_step import BoundStep
from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params
from mooncake_jax.model import sharding
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.request import Sampling

NUM_TABLE_PAGES = 12


def pointers(array):
  shards = array.addressable_shards
  return [shard.data.unsafe_buffer_pointer() for shard in shards]


def make_state(mesh, positions, rows=None) -> DecodeState:
  B = len(positions)
  state = DecodeState(
    tokens_B=np.arange(B, dtype=np.int32),
    positions_B=np.array(positions, np.int32),
    active_B=np.array(positions) > 0,
    page_table_BP=np.stack(
      [make_table(48, NUM_TABLE_PAGES, i) for i in range(B)]
    ),
    sampling=SamplingRows.of(rows or [Sampling()] * B),
  )
  return sharding.place(state, mesh)


@pytest.mark.parametrize('tensor', [1, 2])
def test_the_pool_is_written_in_place(tensor):
  run = Runner(LLAMA, tensor)
  table_P = make_table(30, NUM_TABLE_PAGES)
  before = pointers(run.kv)
  run.prefill(make_prompt(LLAMA, 30), table_P, 0, 30, 32)
  assert pointers(run.kv) == before
  block_L2SKH = pages.gather_pages(run.kv, table_P[:2], 0, 1)
  run.kv, _ = pages.scatter_pages(run.kv, table_P[2:4], block_L2SKH, 1)
  assert pointers(run.kv) == before
  _, _, run.kv = decode_step(
    run.params, LLAMA, run.kv, make_state(run.mesh, [30, 0, 4])
  )
  assert pointers(run.kv) == before


def test_a_scan_over_layers_writes_in_place_too():
  stacked = model_params.stack_layers(make_params(LLAMA))
  run = Runner(LLAMA, params=stacked)
  before = pointers(run.kv)
  table_P = make_table(30, NUM_TABLE_PAGES)
  run.prefill(make_prompt(LLAMA, 30), table_P, 0, 30, 32)
  assert pointers(run.kv) == before


@pytest.mark.parametrize('is_stacked', [False, True])
def test_no_step_copies_the_pool(is_stacked):
  params = make_params(LLAMA)
  params = model_params.stack_layers(params) if is_stacked else params
  run = Runner(LLAMA, num_pages=4096, params=params)
  table_P = make_table(30, NUM_TABLE_PAGES)
  tokens_T, length = np.zeros(16, np.int32), np.int32(9)
  chunk = (tokens_T, table_P, np.int32(0), length, GREEDY)
  state = make_state(run.mesh, [5, 0, 9])
  for step, args in ((prefill_chunk, chunk), (decode_step, (state,))):
    compiled = step.lower(params, LLAMA, run.kv, *args).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= run.kv.nbytes
    assert memory.temp_size_in_bytes < run.kv.nbytes / 8


@pytest.mark.parametrize('tensor', [1, 2])
def test_a_chunk_bucket_compiles_once(tensor):
  run = Runner(LLAMA, tensor)
  jitted: Any = prefill_chunk
  jitted.clear_cache()
  tokens = make_prompt(LLAMA, 40)
  cuts = [(0, 16), (16, 20), (5, 21), (3, 4), (24, 40)]
  for seed, (start, stop) in enumerate(cuts):
    table_P = make_table(40, NUM_TABLE_PAGES, seed)
    run.prefill(tokens, table_P, start, stop, 16)
  # The pool before the first step and those that steps return are alike.
  assert jitted._cache_size() == 1


@pytest.mark.parametrize('tensor', [1, 2])
def test_a_batch_size_compiles_once(tensor):
  run = Runner(LLAMA, tensor)
  jitted: Any = decode_step
  jitted.clear_cache()
  drawn = Sampling(temperature=1.0, top_k=5, top_p=0.9, seed=3)
  for positions in ([5, 9, 0], [1, 2, 3], [40, 0, 0]):
    for rows in (None, [Sampling(), drawn, drawn]):
      state = make_state(run.mesh, positions, rows)
      for _ in range(3):
        state, _, run.kv = decode_step(run.params, LLAMA, run.kv, state)
  assert jitted._cache_size() == 1


def test_only_active_rows_move():
  run = Runner(LLAMA)
  state = make_state(run.mesh, [5, 0, 9])
  after, _, run.kv = decode_step(run.params, LLAMA, run.kv, state)
  assert after.positions_B.tolist() == [6, 0, 10]
  assert after.tokens_B[1] == state.tokens_B[1]
  assert (after.page_table_BP == state.page_table_BP).all()


def test_a_state_without_active_rows_leaves_no_nan():
  run = Runner(LLAMA)
  state, _, run.kv = decode_step(
    run.params, LLAMA, run.kv, make_state(run.mesh, [0, 0, 0])
  )
  assert np.isfinite(np.asarray(run.kv)).all()
  assert state.positions_B.tolist() == [0, 0, 0]


def test_pages_survive_a_round_trip_bit_for_bit():
  kv_LP2CKH = normal(pages.pool_shape(LLAMA, 10, PAGE_TOKENS))
  source = np.asarray(kv_LP2CKH).copy()
  from_n, to_n = np.array([7, 2, 5], np.int32), np.array([1, 8, 3], np.int32)
  block_L2SKH = pages.gather_pages(kv_LP2CKH, from_n, 0, 2)
  assert block_L2SKH.shape == (2, 2, 12, 4, 8)
  # Token 6 of the block is token 2 of its second page.
  np.testing.assert_array_equal(block_L2SKH[1, 0, 6], source[1, 2, 0, 2])
  kv_LP2CKH, _ = pages.scatter_pages(kv_LP2CKH, to_n, block_L2SKH)
  expected = source.copy()
  expected[:, to_n] = source[:, from_n]
  np.testing.assert_array_equal(np.asarray(kv_LP2CKH), expected)


def test_a_pool_needs_more_than_its_scratch_page():
  with pytest.raises(ValueError, match='num_pages=1'):
    pages.init_pool(LLAMA, 1, PAGE_TOKENS)
  with pytest.raises(ValueError, match='page_tokens=0'):
    pages.init_pool(LLAMA, 4, 0)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('tensor', [1, 2])
def test_steps_lower_for_every_platform(tensor, dtype):
  run = Runner(LLAMA, tensor)
  cast = lambda tree: jax.tree.map(lambda a: a.astype(dtype), tree)  # noqa: E731
  params, kv = cast(run.params), cast(run.kv)
  table_P = make_table(30, NUM_TABLE_PAGES)
  length = np.int32(9)
  chunk = (np.zeros(16, np.int32), table_P, np.int32(0), length, GREEDY)
  state = make_state(run.mesh, [5, 0, 9])
  for step, args in (
    (prefill_chunk, (params, LLAMA, kv, *chunk)),
    (decode_step, (params, LLAMA, kv, state)),
  ):
    exported = jax.export.export(step, platforms=['cpu', 'cuda', 'tpu'])(*args)
    assert exported.platforms == ('cpu', 'cuda', 'tpu')
    assert exported.nr_devices == tensor


def test_a_bound_step_draws_as_the_step_it_binds_does():
  rows = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5, seed=2**32 - 1, logprobs=2),
    Sampling(temperature=1.3, top_p=0.6, min_p=0.05, seed=7),
  ]
  plain, bound = Runner(LLAMA), Runner(LLAMA)
  state = make_state(plain.mesh, [30, 0, 4], rows)
  packed = Batch.of(jax.tree.map(np.asarray, state))
  batch = sharding.place(packed, bound.mesh)
  step = BoundStep(bound.params, LLAMA, 'jnp')
  for _ in range(3):
    state, report_BR, plain.kv = decode_step(
      plain.params, LLAMA, plain.kv, state
    )
    batch, found_BR, bound.kv = step(bound.kv, batch)
    np.testing.assert_array_equal(found_BR, report_BR)
    np.testing.assert_array_equal(batch.moving_2B[0], state.tokens_B)
    np.testing.assert_array_equal(batch.moving_2B[1], state.positions_B)
