# SPDX-License-Identifier: Apache-2.0
"""Draws: greedy limits, right distribution, no dependence on the batch."""

from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mooncake_jax.model import logprobs
from mooncake_jax.model.sampling import sample
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.request import Sampling

VOCAB = 50
draw = jax.jit(sample)


def make_logits(num_rows: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.normal(0, 2, (num_rows, VOCAB)).astype(np.float32)


def draw_many(logits_V: np.ndarray, sampling: Sampling, count: int):
  """Draws at positions 0 .. count - 1 of one request."""
  logits_BV = jnp.tile(logits_V[None], (count, 1))
  rows = SamplingRows.of([sampling] * count)
  return np.asarray(draw(logits_BV, rows, jnp.arange(count)))


@pytest.mark.parametrize(
  'sampling',
  [
    Sampling(),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1e-4),
  ],
)
def test_these_take_the_most_likely_token(sampling):
  logits_BV = make_logits(16)
  rows = SamplingRows.of([sampling] * 16)
  tokens_B = draw(logits_BV, rows, jnp.arange(16))
  np.testing.assert_array_equal(tokens_B, logits_BV.argmax(-1))


def expected_probabilities(logits_V: np.ndarray, s: Sampling) -> np.ndarray:
  """Float64, one row, by sorting: min-p, then top-k, then top-p."""
  p_V = np.exp(logits_V.astype(np.float64) / s.temperature)
  p_V[p_V < s.min_p * p_V.max()] = 0
  order = np.argsort(-p_V)
  p_V[order[s.top_k or len(p_V) :]] = 0
  p_V /= p_V.sum()
  before = np.cumsum(p_V[order]) - p_V[order]
  p_V[order[before >= s.top_p]] = 0
  return p_V / p_V.sum()


@pytest.mark.parametrize(
  'sampling',
  [
    Sampling(temperature=0.7),
    Sampling(temperature=2.0, seed=1),
    Sampling(temperature=1.0, top_k=7),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.05),
    Sampling(temperature=1.2, top_k=12, top_p=0.9, min_p=0.02, seed=4),
  ],
)
def test_draws_follow_the_distribution(sampling):
  logits_V, count = make_logits(1)[0], 50_000
  tokens = draw_many(logits_V, sampling, count)
  expected_V = count * expected_probabilities(logits_V, sampling)
  counts_V = np.bincount(tokens, minlength=VOCAB)
  assert not counts_V[expected_V == 0].any()
  rare = (expected_V > 0) & (expected_V < 20)
  rare[np.where(expected_V > 0, expected_V, np.inf).argmin()] = True
  often = (expected_V > 0) & ~rare
  observed = [*counts_V[often], counts_V[rare].sum()]
  expected = [*expected_V[often], expected_V[rare].sum()]
  assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_top_k_draws_exactly_the_k_most_likely():
  logits_V = make_logits(1)[0] / 4
  tokens = draw_many(logits_V, Sampling(temperature=1.0, top_k=5), 2000)
  assert set(tokens) == set(np.argsort(logits_V)[-5:])


def test_top_p_draws_the_fewest_that_reach_the_mass():
  logits_V = np.full(VOCAB, -np.inf, np.float32)
  logits_V[[4, 9, 2, 7]] = np.log([0.5, 0.3, 0.1, 0.1])
  for top_p, kept in ((0.45, {4}), (0.7, {4, 9}), (1.0, {4, 9, 2, 7})):
    sampling = Sampling(temperature=1.0, top_p=top_p)
    assert set(draw_many(logits_V, sampling, 500)) == kept


def test_top_p_applies_to_what_top_k_left():
  logits_V = np.full(VOCAB, -np.inf, np.float32)
  logits_V[[4, 9, 2, 7]] = np.log([0.4, 0.3, 0.2, 0.1])
  # Among the top two the first has 4/7 of the mass, above 0.5.
  sampling = Sampling(temperature=1.0, top_k=2, top_p=0.5)
  assert set(draw_many(logits_V, sampling, 300)) == {4}


def test_a_draw_does_not_depend_on_its_batch():
  logits_BV = make_logits(4)
  rows = [
    Sampling(temperature=1.0, seed=1),
    Sampling(),
    Sampling(temperature=0.8, top_k=7, seed=2),
    Sampling(temperature=1.5, top_p=0.8, min_p=0.1, seed=-3),
  ]
  positions = np.array([3, 9, 27, 81], np.int32)
  together = draw(logits_BV, SamplingRows.of(rows), positions)
  for i, row in enumerate(rows):
    at = slice(i, i + 1)
    alone = draw(logits_BV[at], SamplingRows.of([row]), positions[at])
    assert alone[0] == together[i]
  order = np.array([2, 0, 3, 1])
  mixed = SamplingRows.of([rows[i] for i in order])
  np.testing.assert_array_equal(
    draw(logits_BV[order], mixed, positions[order]), together[order]
  )


def test_seed_and_position_make_the_draw():
  logits_V = np.zeros(VOCAB, np.float32)
  first = draw_many(logits_V, Sampling(temperature=1.0, seed=1), 200)
  again = draw_many(logits_V, Sampling(temperature=1.0, seed=1), 200)
  other = draw_many(logits_V, Sampling(temperature=1.0, seed=2), 200)
  np.testing.assert_array_equal(first, again)
  assert (first != other).mean() > 0.9
  assert len(set(first)) > 25


def test_any_seed_fits():
  seeds = [0, -1, 2**31, 2**32 - 1, 2**63]
  rows = SamplingRows.of([Sampling(seed=seed) for seed in seeds])
  assert rows.seed_B.dtype == np.int32
  assert len({int(seed) for seed in rows.seed_B[:4]}) == 3  # -1 = 2**32 - 1


def test_a_greedy_batch_neither_sorts_nor_draws():
  rows = SamplingRows.of([Sampling()] * 2)
  text = draw.lower(make_logits(2), rows, jnp.arange(2)).as_text()
  outside = text[: text.index('stablehlo.case')]
  assert 'stablehlo.sort' not in outside
  assert 'threefry' not in outside


def test_what_is_not_sampling_is_refused():
  wrong: Any = (('min_p', 1.5), ('logprobs', 21), ('logprobs', -1))
  for field, value in wrong:
    with pytest.raises(ValueError, match=f'Sampling.{field}={value}'):
      Sampling(**{field: value})


def test_reported_log_probabilities_are_the_models():
  logits_BV = make_logits(3)
  tokens_B = np.array([5, 7, 9], np.int32)
  p_BV = np.exp(logits_BV.astype(np.float64))
  expected_BV = np.log(p_BV / p_BV.sum(-1, keepdims=True))
  report_BR = np.asarray(
    jax.jit(logprobs.report)(logits_BV, tokens_B, tokens_B > 5)
  )
  np.testing.assert_array_equal(logprobs.tokens(report_BR), tokens_B)
  for row, token in enumerate(tokens_B):
    found = logprobs.of_row(report_BR[row], 4)
    ids, values = zip(*found.top)
    best = np.argsort(-expected_BV[row])[:4]
    assert list(ids) == best.tolist()
    np.testing.assert_allclose(values, expected_BV[row, best], atol=1e-5)
    np.testing.assert_allclose(
      found.logprob, expected_BV[row, token], atol=1e-5
    )
  found = logprobs.of_row(report_BR[1], 0)
  assert found.top == () and found.logprob < 0


def test_log_probabilities_cost_nothing_where_none_are_asked_for():
  args = (make_logits(2), np.zeros(2, np.int32), np.zeros(2, bool))
  lowered: Any = jax.jit(logprobs.report).lower(*args)
  text = lowered.as_text()
  outside = text[: text.index('stablehlo.case')]
  assert 'exponential' not in outside and 'top_k' not in outside
