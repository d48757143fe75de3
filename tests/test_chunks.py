# SPDX-License-Identifier: Apache-2.0
"""Chunk sizes and pipelines, against brute force and closed forms."""

from dataclasses import replace

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from cost_pieces import polynomial
from cost_pieces import roofline
from mooncake_jax.costs import chunks
from mooncake_jax.costs import pipeline
from mooncake_jax.costs.best_chunk import ideal_chunk_tokens
from mooncake_jax.costs.chunks import chunk_stops
from mooncake_jax.costs.chunks import dynamic_chunk_tokens
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import PolynomialCost

# Not so small that their squares are no numbers any more.
coefficient = st.just(0.0) | st.floats(1e-6, 1)


@st.composite
def polynomials(draw) -> PolynomialCost:
  """Any signs of physical costs, zeros included."""
  return polynomial(
    prefill_base_s=draw(coefficient) * 1e-2,
    prefill_s_per_prefix_token=draw(coefficient) * 1e-6,
    prefill_s_per_token=draw(coefficient) * 1e-4,
    prefill_s_per_token_squared=draw(coefficient) * 1e-8,
  )


class Opaque:
  """A cost model whose form nobody knows: it is bisected."""

  def __init__(self, costs: CostModel):
    self.prefill_s = costs.prefill_s


@given(
  costs=st.one_of(polynomials(), st.just(roofline())),
  num_tokens=st.integers(0, 3000),
  prefix_tokens=st.integers(0, 3000),
  chunk_tokens=st.integers(1, 900),
  chunking=st.sampled_from(chunks.CHUNKINGS),
  data=st.data(),
)
def test_chunks_cover_what_is_left_in_sizes_that_were_asked_for(
  costs, num_tokens, prefix_tokens, chunk_tokens, chunking, data
):
  quantum = data.draw(st.integers(1, chunk_tokens))
  stops = chunk_stops(
    costs, num_tokens, prefix_tokens, chunk_tokens, chunking, quantum
  )
  sizes = [b - a for a, b in zip((prefix_tokens, *stops), stops)]
  assert sum(sizes) == max(num_tokens - prefix_tokens, 0)
  assert all(0 < size <= chunk_tokens for size in sizes)
  if chunking == 'fixed':
    assert all(size == chunk_tokens for size in sizes[:-1])
  else:
    assert all(size % quantum == 0 for size in sizes[:-1])
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)


@given(
  costs=polynomials(),
  prefix_tokens=st.integers(0, 100_000),
  chunk_tokens=st.integers(1, 300),
  data=st.data(),
)
def test_a_dynamic_chunk_is_the_largest_that_takes_no_longer(
  costs, prefix_tokens, chunk_tokens, data
):
  quantum = data.draw(st.integers(1, chunk_tokens))
  target_s = costs.prefill_s(chunk_tokens, 0) * (1 + chunks.SLACK)
  sizes = range(quantum, chunk_tokens + 1, quantum)
  fitting = [x for x in sizes if costs.prefill_s(x, prefix_tokens) <= target_s]
  want = max(fitting, default=quantum)
  args = (prefix_tokens, chunk_tokens, quantum)
  assert dynamic_chunk_tokens(Opaque(costs), *args) == want  # pyright: ignore
  assert dynamic_chunk_tokens(costs, *args) == want


def test_where_chunks_cost_nothing_they_are_as_large_as_can_be():
  free = polynomial(
    prefill_base_s=0.0,
    prefill_s_per_prefix_token=0.0,
    prefill_s_per_token=0.0,
    prefill_s_per_token_squared=0.0,
  )
  assert dynamic_chunk_tokens(free, 0, 7, 2) == 6
  only_squares = replace(free, prefill_s_per_token_squared=1e-8)
  assert dynamic_chunk_tokens(only_squares, 0, 8) == 8
  assert dynamic_chunk_tokens(only_squares, 3, 8) == 5


def test_dynamic_chunks_take_equally_long_and_fixed_ones_longer_and_longer():
  costs = polynomial(prefill_s_per_prefix_token=0.0)
  stops = chunk_stops(costs, 100_000, 0, 4096, 'dynamic', 64)
  seconds = chunks.chunk_seconds(costs, 0, stops)[:-1]
  assert max(seconds) < 1.05 * min(seconds)
  fixed = chunk_stops(None, 100_000, 0, 4096, 'fixed')
  seconds = chunks.chunk_seconds(costs, 0, fixed)[:-1]
  assert max(seconds) > 2 * min(seconds)


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ((polynomial(), 9, 0, 0, 'fixed'), 'chunk_tokens=0'),
    ((polynomial(), 9, 0, 4, 'sorted'), "chunking='sorted'"),
    ((polynomial(), 9, 0, 4, 'dynamic', 5), 'quantum=5 must be at most'),
    ((polynomial(), 9, 0, 4, 'dynamic', 0), 'quantum=0'),
    ((None, 9, 0, 4, 'dynamic'), "chunking='dynamic' needs costs"),
  ],
)
def test_impossible_chunks_are_named(args, message):
  with pytest.raises(ValueError, match=message):
    chunk_stops(*args)


@given(num_layers=st.integers(1, 100), data=st.data())
def test_stages_share_layers_as_evenly_as_possible(num_layers, data):
  stages = data.draw(st.integers(1, num_layers))
  shares = pipeline.stage_shares(num_layers, stages)
  assert sum(shares) == num_layers and len(shares) == stages
  assert max(shares) - min(shares) <= 1
  assert pipeline.stage_shares(num_layers, stages, shares) == shares


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    ((4, 5), 'stages=5 must be at most num_layers=4'),
    ((4, 0), 'stages=0'),
    ((4, 2, (3, 2)), 'add up to num_layers=4'),
    ((4, 2, (1, 1, 2)), 'stages=2 numbers'),
    ((4, 2, (4, 0)), r'stage_layers\[1\]=0'),
  ],
)
def test_an_impossible_split_is_named(args, message):
  with pytest.raises(ValueError, match=message):
    pipeline.stage_shares(*args)


def brute_force_s(seconds, layers, boundary_s) -> float:
  """The longest way through the grid: a way goes to the next chunk or stage."""
  if not seconds:
    return 0.0
  total = sum(layers)

  def to(c: int, s: int) -> float:
    before = [0.0]
    if c:
      before.append(to(c - 1, s))
    if s:
      before.append(to(c, s - 1) + boundary_s)
    return max(before) + seconds[c] * layers[s] / total

  return to(len(seconds) - 1, len(layers) - 1)


@settings(deadline=None)
@given(
  seconds=st.lists(st.floats(0, 10), max_size=6),
  layers=st.lists(st.integers(1, 9), min_size=1, max_size=5),
  boundary_s=st.floats(0, 1),
)
def test_a_makespan_is_the_longest_way_through_chunks_and_stages(
  seconds, layers, boundary_s
):
  want = brute_force_s(seconds, layers, boundary_s)
  got = pipeline.makespan_s(seconds, layers, boundary_s)
  assert got == pytest.approx(want)
  each = [boundary_s] * len(seconds)
  assert pipeline.makespan_s(seconds, layers, each) == got


@given(
  seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
  layers=st.lists(st.integers(1, 9), min_size=1, max_size=5),
  boundary_s=st.floats(0, 1),
)
def test_spans_keep_the_order_of_chunks_and_of_stages(
  seconds, layers, boundary_s
):
  spans = pipeline.stage_spans(seconds, layers, boundary_s)
  at = {(span.chunk, span.stage): span for span in spans}
  assert len(at) == len(spans) == len(seconds) * len(layers)
  for (chunk, stage), span in at.items():
    if chunk:
      assert span.start_s >= at[chunk - 1, stage].stop_s
    if stage:
      assert span.start_s >= at[chunk, stage - 1].stop_s + boundary_s
  parts = pipeline.split(spans)
  assert parts.makespan_s == pytest.approx(spans[-1].stop_s)
  assert parts.boundary_s == pytest.approx((len(layers) - 1) * boundary_s)
  assert parts.bubble_s >= -1e-9


@given(
  num_chunks=st.integers(0, 40),
  stages=st.integers(1, 8),
  chunk_s=st.floats(0.01, 10),
  boundary_s=st.floats(0, 1),
)
def test_even_chunks_and_stages_have_a_closed_form(
  num_chunks, stages, chunk_s, boundary_s
):
  seconds, layers = [chunk_s] * num_chunks, [3] * stages
  want = pipeline.makespan_s(seconds, layers, boundary_s)
  got = pipeline.even_makespan_s(num_chunks, stages, chunk_s, boundary_s)
  assert got == pytest.approx(want)
  if num_chunks:
    parts = pipeline.split(pipeline.stage_spans(seconds, layers))
    share = pipeline.even_bubble_share(num_chunks, stages)
    assert parts.bubble_s == pytest.approx(share * parts.makespan_s, abs=1e-9)


@given(
  costs=polynomials(),
  num_tokens=st.integers(0, 3000),
  prefix_tokens=st.integers(0, 3000),
  chunk_tokens=st.integers(64, 900),
)
def test_one_stage_costs_what_the_prompt_costs(
  costs, num_tokens, prefix_tokens, chunk_tokens
):
  args = (num_tokens, prefix_tokens, chunk_tokens)
  want = costs.prompt_s(*args)
  assert pipeline.pipelined_prompt_s(costs, *args, (30,)) == want
  stops = chunk_stops(costs, *args, 'fixed')
  seconds = chunks.chunk_seconds(costs, prefix_tokens, stops)
  assert pipeline.makespan_s(seconds, (30,)) == pytest.approx(want)


@settings(max_examples=30)
@given(
  costs=polynomials(),
  num_tokens=st.integers(1, 5000),
  stages=st.integers(1, 8),
  sizes=st.lists(st.integers(64, 5000), min_size=1, max_size=6),
  chunking=st.sampled_from(chunks.CHUNKINGS),
)
def test_the_best_size_is_no_worse_than_any(
  costs, num_tokens, stages, sizes, chunking
):
  layers = pipeline.stage_shares(80, stages)

  def seconds(size: int) -> float:
    return pipeline.pipelined_prompt_s(
      costs, num_tokens, 0, size, layers, chunking=chunking, quantum=64
    )

  best = pipeline.best_chunk_tokens(
    costs, num_tokens, 0, layers, sizes, chunking=chunking, quantum=64
  )
  assert best in sizes and seconds(best) == min(map(seconds, sizes))


def test_more_stages_want_smaller_chunks_than_one():
  sizes = [512 << i for i in range(8)]
  best = [
    pipeline.best_chunk_tokens(
      polynomial(), 65536, 0, pipeline.stage_shares(80, stages), sizes
    )
    for stages in (1, 2, 4, 8)
  ]
  assert best[0] == 65536 and best == sorted(best, reverse=True)
  assert best[1] < best[0] and best[3] < best[1]


def test_nothing_to_choose_from_is_named():
  with pytest.raises(ValueError, match=r'sizes=\(\)'):
    pipeline.best_chunk_tokens(polynomial(), 9, 0, (1,), ())


@settings(max_examples=40, deadline=None)
@given(
  base_s=st.floats(1e-3, 5e-2),
  squared_s=st.floats(0, 2e-9),
  num_tokens=st.integers(8_000, 128_000),
  stages=st.integers(2, 8),
  chunking=st.sampled_from(chunks.CHUNKINGS),
)
def test_the_ideal_size_is_hardly_worse_than_the_best_by_search(
  base_s, squared_s, num_tokens, stages, chunking
):
  costs = polynomial(
    prefill_base_s=base_s,
    prefill_s_per_prefix_token=0.0,
    prefill_s_per_token_squared=squared_s,
  )
  layers = [10] * stages

  def seconds(size: int) -> float:
    return pipeline.pipelined_prompt_s(
      costs, num_tokens, 0, size, layers, chunking=chunking
    )

  sizes = [round(128 * 2 ** (i / 4)) for i in range(40)]
  best = pipeline.best_chunk_tokens(
    costs, num_tokens, 0, layers, sizes, chunking=chunking
  )
  ideal = ideal_chunk_tokens(costs, num_tokens, stages, chunking)
  # The closed form knows no whole chunks: one more may be begun.
  assert seconds(round(ideal)) < 1.03 * seconds(best) + base_s / stages


def test_one_stage_has_no_bubbles_and_takes_the_prompt_whole():
  assert ideal_chunk_tokens(polynomial(), 4096, 1) == 4096


def test_costs_that_do_not_grow_with_the_chunk_ask_for_the_whole_prompt():
  free = polynomial(prefill_s_per_token=0.0, prefill_s_per_token_squared=0.0)
  for chunking in chunks.CHUNKINGS:
    assert ideal_chunk_tokens(free, 4096, 4, chunking) == 4096
  # As fits of long prompts find them: b is 0, and a is not.
  steep = polynomial(prefill_s_per_token=0.0)
  assert ideal_chunk_tokens(steep, 4096, 4, 'dynamic') == 4096


def test_nothing_consists_of_nothing():
  assert pipeline.split([]).makespan_s == 0
  assert pipeline.even_bubble_share(0, 1) == 0
