# SPDX-License-Identifier: Apache-2.0
"""Rows as token ids and as block keys: the same reuse in both."""

from functools import partial

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.workload.scale import scale_trace
from mooncake_jax.workload.scale import TraceScale
from mooncake_jax.workload.tokens import to_requests
from mooncake_jax.workload.tokens import TokenMaker
from mooncake_jax.workload.tokens import trace_block_keys
from mooncake_jax.workload.trace import TraceRow
from tests.trace_strategies import traces_of


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
  n = min(len(a), len(b))
  return int(np.argmin(np.append(a[:n] == b[:n], False)))


# A wide vocabulary, so that chance does not make two blocks alike.
WIDE = 2**31 - 1


@settings(deadline=None)
@given(rows=traces_of(8), seed=st.integers(0, 2**62))
def test_prompts_share_tokens_exactly_as_far_as_they_share_ids(rows, seed):
  maker = TokenMaker(WIDE, tokens_per_hash_id=8, seed=seed)
  prompts = [maker.prompt(row) for row in rows]
  for a, p in zip(rows, prompts):
    assert p.dtype == np.int32 and len(p) == a.input_tokens
    for b, q in zip(rows, prompts):
      ids = shared_prefix(np.array(a.hash_ids), np.array(b.hash_ids))
      want = min(ids * 8, a.input_tokens, b.input_tokens)
      assert shared_prefix(p, q) == want


@settings(max_examples=200, deadline=None)
@given(
  data=st.data(),
  tokens_per_hash_id=st.integers(1, 12),
  block_size_tokens=st.integers(1, 30),
)
def test_keys_from_ids_are_equal_where_keys_from_tokens_are(
  data, tokens_per_hash_id, block_size_tokens
):
  rows = data.draw(traces_of(tokens_per_hash_id))
  maker = TokenMaker(WIDE, tokens_per_hash_id=tokens_per_hash_id)
  pairs = set()
  for row in rows:
    short = trace_block_keys(row, tokens_per_hash_id, block_size_tokens)
    long = prefix_keys(maker.prompt(row), block_size_tokens)
    assert len(short) == len(long) == row.input_tokens // block_size_tokens
    pairs.update(zip(short, long))
  # One to one: as many pairs as keys of either kind.
  assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_scaling_keeps_which_requests_share_a_block():
  rows = [TraceRow(0, 1300, 9, (0, 7, 9)), TraceRow(1, 1536, 9, (0, 7, 8))]
  got = scale_trace(rows, TraceScale(length_scale=1 / 16))
  old = [trace_block_keys(row, 512, 512) for row in rows]
  new = [trace_block_keys(row, 32, 32) for row in got.rows]
  assert [len(keys) for keys in old] == [len(keys) for keys in new] == [2, 3]
  assert (old[0] == old[1][:2]) and (new[0] == new[1][:2])


@settings(max_examples=50)
@given(
  vocab_size=st.integers(10, 60_000),
  first_token=st.integers(0, 5),
  excluded=st.sets(st.integers(0, 9), max_size=4),
)
def test_tokens_avoid_what_they_shall_avoid_and_use_the_rest(
  vocab_size, first_token, excluded
):
  allowed = set(range(first_token, vocab_size)) - excluded
  if len(allowed) < 2:
    return
  maker = TokenMaker(vocab_size, first_token, tuple(excluded))
  tokens = set(maker.block(5, 2000).tolist())
  assert tokens <= allowed
  if len(allowed) < 100:
    assert tokens == allowed


def test_tokens_of_an_id_are_fixed_for_ever():
  # These numbers may never change: recorded runs depend on them.
  maker = TokenMaker(49152, first_token=17, seed=1)
  assert maker.block(3, 5).tolist() == [
    11040, 40482, 47634, 12579, 10136,
  ]  # fmt: skip


def test_requests_are_sorted_and_simulation_and_engine_see_the_same_reuse():
  rows = [TraceRow(2.0, 70, 3, (0, 1, 2)), TraceRow(1.0, 64, 4, (0, 1))]
  maker = TokenMaker(1000, tokens_per_hash_id=32)
  in_blocks = partial(to_requests, block_size_tokens=16, tokens_per_hash_id=32)
  lengths = in_blocks(rows)
  tokens = in_blocks(rows, maker=maker, identity='model')
  for requests in (lengths, tokens):
    assert [r.request_id for r in requests] == ['row1', 'row0']
    assert [r.arrival_s for r in requests] == [1.0, 2.0]
    assert [r.max_output_tokens for r in requests] == [4, 3]
    assert [len(r.block_keys) for r in requests] == [4, 4]
    assert requests[0].block_keys == requests[1].block_keys
  assert lengths[0].prompt is None
  prompt = tokens[0].prompt
  assert prompt is not None
  assert tokens[0].block_keys == prefix_keys(prompt, 16, 'model')


def test_tenants_share_no_block():
  row = [TraceRow(0.0, 64, 3, (0, 1))]
  in_blocks = partial(to_requests, block_size_tokens=16, tokens_per_hash_id=32)
  maker = TokenMaker(1000, tokens_per_hash_id=32)
  for make in (in_blocks, partial(in_blocks, maker=maker)):
    (a,), (b,) = make(row, tenant='a'), make(row, tenant='b')
    assert not set(a.block_keys) & set(b.block_keys)


def test_a_maker_of_another_scale_is_refused():
  with pytest.raises(ValueError, match='tokens_per_hash_id=512 but the rows'):
    to_requests(
      [], block_size_tokens=16, tokens_per_hash_id=32, maker=TokenMaker(1000)
    )


def test_a_vocabulary_with_nothing_left_is_named():
  with pytest.raises(ValueError, match='TokenMaker.vocab_size=10 leaves 1'):
    TokenMaker(10, first_token=9)
