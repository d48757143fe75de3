# SPDX-License-Identifier: Apache-2.0
"""Costs that are wrong on purpose: how much, always alike, still sensible."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from cost_pieces import polynomial
from mooncake_jax.costs.perturbed import PerturbedCost
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import serve_alone

TRUE = polynomial()
NOISY = PerturbedCost(
  TRUE, prefill_noise=0.3, decode_noise=0.3, transfer_noise=0.3
)

ROWS = range(1, 30)


def test_without_noise_or_bias_nothing_changes():
  same = PerturbedCost(TRUE)
  assert same.prefill_s(512, 100) == TRUE.prefill_s(512, 100)
  assert same.prompt_s(5000, 100, 512) == TRUE.prompt_s(5000, 100, 512)
  assert same.decode_step_s(8, 10_000) == TRUE.decode_step_s(8, 10_000)
  assert same.transfer_s(10**6, 'copy') == TRUE.transfer_s(10**6, 'copy')


def test_a_bias_is_of_its_term_alone():
  slow = PerturbedCost(TRUE, prefill_bias=1.5)
  assert slow.prefill_s(512, 100) == 1.5 * TRUE.prefill_s(512, 100)
  assert slow.prompt_s(512, 0, 128) == 1.5 * TRUE.prompt_s(512, 0, 128)
  assert slow.decode_step_s(8, 10_000) == TRUE.decode_step_s(8, 10_000)


@pytest.mark.parametrize(
  'factor',
  [
    lambda c, i: c.prompt_s(i, 0, 512) / TRUE.prompt_s(i, 0, 512),
    lambda c, i: c.prefill_s(i, 64) / TRUE.prefill_s(i, 64),
    lambda c, i: c.decode_step_s(i, 100) / TRUE.decode_step_s(i, 100),
    lambda c, i: c.transfer_s(i, 'copy') / TRUE.transfer_s(i, 'copy'),
  ],
)
def test_factors_are_log_normal_with_mean_one(factor):
  factors = np.array([factor(NOISY, i) for i in range(1, 4001)])
  assert factors.mean() == pytest.approx(1.0, abs=0.02)
  assert np.log(factors).std() == pytest.approx(0.3, abs=0.01)
  # Neighbours have nothing to do with each other.
  assert abs(np.corrcoef(factors[:-1], factors[1:])[0, 1]) < 0.05
  again = [factor(replace(NOISY), i) for i in range(1, 41)]
  assert again == factors[:40].tolist()
  other = [factor(replace(NOISY, seed=1), i) for i in range(1, 41)]
  assert not set(other) & set(again)


def test_rows_that_ride_along_take_time_however_noisy_steps_are():
  riding = [NOISY.riding_s(rows, 0) / TRUE.riding_s(rows, 0) for rows in ROWS]
  steps = [NOISY.decode_step_s(r, 0) / TRUE.decode_step_s(r, 0) for r in ROWS]
  assert riding == pytest.approx(steps)  # one factor for both


def test_terms_and_links_are_off_apart():
  by_link = [
    NOISY.transfer_s(999, 'copy') / TRUE.transfer_s(999, 'copy'),
    NOISY.transfer_s(999, 'onload') / TRUE.transfer_s(999, 'onload'),
    NOISY.decode_step_s(999, 0) / TRUE.decode_step_s(999, 0),
    NOISY.prefill_s(999, 0) / TRUE.prefill_s(999, 0),
  ]
  assert len({round(factor, 9) for factor in by_link}) == 4


@given(st.integers(2, 200_000), st.data())
def test_reuse_saves_its_share_and_steps_are_linear_in_context(tokens, data):
  prefix = data.draw(st.integers(1, tokens - 1))
  noisy, true = (
    c.prompt_s(tokens, prefix, 512) / c.prompt_s(tokens, 0, 512)
    for c in (NOISY, TRUE)
  )
  assert noisy == pytest.approx(true)
  rows = data.draw(st.integers(1, 512))
  a, b, c = (NOISY.decode_step_s(rows, tokens + i * rows) for i in range(3))
  assert b - a == pytest.approx(c - b, abs=1e-12)


@pytest.mark.parametrize(
  'wrong',
  [{'prefill_bias': 0.0}, {'decode_noise': -0.1}, {'seed': -1}, {'seed': 0.5}],
)
def test_a_senseless_perturbation_is_named(wrong):
  (name,) = wrong
  with pytest.raises(ValueError, match=f'PerturbedCost.{name}='):
    PerturbedCost(TRUE, **wrong)


def served(*bindings: str):
  run = 'configs/run/sim_misjudged.gin'
  few = ('conversation.num_requests=60', *bindings)
  experiment, _ = load(run, few, Experiment)
  return serve_alone(experiment).summary


def test_a_belief_that_is_off_shows_in_the_errors_and_each_time_alike():
  none = 'PerturbedCost.prefill_noise=0.0'
  sure, off = served(none), served()
  assert off == served()
  p50 = [s.prediction_errors['prefill']['p50_s'] for s in (sure, off)]
  assert p50[0] < 1e-9 < 0.05 < p50[1]
  # What work takes is the truth's, whatever is believed.
  assert off.completed == sure.completed == 60
