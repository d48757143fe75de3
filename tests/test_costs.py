# SPDX-License-Identifier: Apache-2.0
"""Costs: closed forms, what a fit finds, rooflines against published times."""

from dataclasses import replace

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from cost_pieces import polynomial
from cost_pieces import roofline
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import fit_decode
from mooncake_jax.costs.fit import fit_link
from mooncake_jax.costs.fit import fit_prefill
from mooncake_jax.costs.fit import LinkSample
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.model import Chunk
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.perturbed import PerturbedCost
from mooncake_jax.costs.table import Line
from mooncake_jax.costs.table import TableCost

TABLE = TableCost(
  (Line(512, 0.1, 1e-6), Line(4096, 0.8, 1e-5)),
  (Line(1, 0.02, 1e-8), Line(64, 0.03, 1e-8)),
  polynomial(),
)


@given(
  num_tokens=st.integers(0, 5000),
  prefix_tokens=st.integers(0, 5000),
  chunk_tokens=st.integers(1, 1500),
)
def test_closed_form_of_a_prompt_is_the_sum_of_its_chunks(
  num_tokens, prefix_tokens, chunk_tokens
):
  args = (num_tokens, prefix_tokens, chunk_tokens)
  want = CostModel.prompt_s(polynomial(), *args)
  assert polynomial().prompt_s(*args) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize('cost', [polynomial(), roofline()])
def test_more_work_never_takes_less_time(cost: CostModel):
  chunks = [cost.prefill_s(x, 0) for x in (1, 64, 512, 4096)]
  prefixes = [cost.prefill_s(512, p) for p in (0, 512, 8192, 100_000)]
  batches = [cost.decode_step_s(b, 4096) for b in (1, 8, 64, 512)]
  contexts = [cost.decode_step_s(8, s) for s in (8, 4096, 10**6)]
  sizes = [cost.transfer_s(n, 'copy') for n in (0, 10**6, 10**9)]
  for times in (chunks, prefixes, batches, contexts, sizes):
    assert times == sorted(times)


@pytest.mark.parametrize('cost', [polynomial(), roofline()])
def test_reuse_saves_and_a_fully_cached_prompt_is_free(cost: CostModel):
  assert cost.prompt_s(8192, 4096, 1024) < cost.prompt_s(8192, 0, 1024)
  assert cost.prompt_s(8192, 8192, 1024) == 0


@pytest.mark.parametrize(
  'cost',
  [
    polynomial(),
    roofline(),
    TABLE,
    PerturbedCost(polynomial(), prefill_bias=2),
  ],
)
def test_a_pass_over_one_chunk_is_that_chunk_and_over_more_shares(cost):
  one, other = Chunk(512, 1000), Chunk(300, 0)
  assert cost.pass_s([one]) == pytest.approx(cost.prefill_s(*one))
  both_s = cost.pass_s([one, other])
  assert cost.prefill_s(*one) < both_s
  apart_s = cost.prefill_s(*one) + cost.prefill_s(*other)
  assert both_s <= apart_s * (1 + 1e-12)  # a roofline of arithmetic: equal


def test_chunks_below_a_tables_smallest_are_not_free_together():
  """Eight of the smallest size are as one of the largest, not as one."""
  eight_s = TABLE.pass_s([Chunk(512, 0)] * 8)
  assert eight_s == pytest.approx(TABLE.prefill_s(4096, 0)) == 0.8


def test_a_roofline_reads_weights_once_a_pass():
  cost = roofline(flops_per_s=1e18)  # only reading takes time
  weights_s = cost.prefill_s(1, 0)
  assert cost.pass_s([Chunk(1, 0)] * 8) == pytest.approx(weights_s, rel=1e-3)


def test_each_link_has_its_own_line():
  cost = polynomial(onload_bytes_per_s=4e9, onload_latency_s=0.5)
  assert cost.transfer_s(2 * 10**9, 'onload') == pytest.approx(1.0)
  assert cost.transfer_s(2 * 10**9, 'handoff') == pytest.approx(2.0001)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('prefill_s_per_token', -1e-9),
    ('decode_base_s', float('nan')),
    ('copy_bytes_per_s', 0),
    ('copy_bytes_per_s', float('inf')),
    ('handoff_latency_s', '1ms'),
  ],
)
def test_an_unphysical_coefficient_is_named(field, value):
  with pytest.raises(ValueError, match=f'PolynomialCost.{field}='):
    polynomial(**{field: value})


coefficient = st.floats(1e-3, 1.0)


@settings(max_examples=25, deadline=None)
@given(c=coefficient, gamma=coefficient, b=coefficient, a=coefficient)
def test_a_prefill_fit_finds_what_made_the_samples(c, gamma, b, a):
  want = polynomial(
    prefill_base_s=c * 1e-2,
    prefill_s_per_prefix_token=gamma * 1e-5,
    prefill_s_per_token=b * 1e-4,
    prefill_s_per_token_squared=a * 1e-8,
  )
  samples = [
    PrefillSample(x, prefix, want.prefill_s(x, prefix))
    for x in (1, 64, 300, 1024, 4096)
    for prefix in (0, 512, 5000, 60_000)
  ]
  fit = fit_prefill(samples)
  assert fit.mape < 1e-6
  assert fit.num_samples == 20
  for name, value in fit.coefficients.items():
    assert value == pytest.approx(getattr(want, name), rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(d0=coefficient, d1=coefficient, d2=coefficient)
def test_a_decode_fit_finds_what_made_the_samples(d0, d1, d2):
  want = polynomial(
    decode_base_s=d0 * 1e-1,
    decode_s_per_row=d1 * 1e-3,
    decode_s_per_context_token=d2 * 1e-6,
  )
  samples = [
    DecodeSample(b, b * s, want.decode_step_s(b, b * s))
    for b in (1, 4, 16, 64)
    for s in (16, 1024, 8192)
  ]
  fit = fit_decode(samples)
  assert fit.mape < 1e-6
  for name, value in fit.coefficients.items():
    assert value == pytest.approx(getattr(want, name), rel=1e-4)


@pytest.mark.parametrize('link', LINKS)
def test_a_link_fit_finds_bandwidth_and_latency(link):
  want = polynomial(**{f'{link}_bytes_per_s': 3e9, f'{link}_latency_s': 7e-5})
  sizes = (10**4, 10**6, 10**8)
  fit = fit_link([LinkSample(n, want.transfer_s(n, link)) for n in sizes], link)
  for name, value in fit.coefficients.items():
    assert value == pytest.approx(getattr(want, name), rel=1e-6)


def test_noise_shows_as_mape_and_no_coefficient_is_negative():
  rng = np.random.default_rng(0)
  samples = [
    # Constant cost: the true slopes are 0, noise would make some negative.
    PrefillSample(x, p, 0.01 * rng.uniform(0.8, 1.2))
    for x in (32, 128, 512)
    for p in (0, 1000, 4000)
  ]
  fit = fit_prefill(samples)
  assert 0.02 < fit.mape < 0.2
  assert min(fit.coefficients.values()) >= 0
  polynomial(**fit.coefficients)


def test_a_fit_refuses_what_it_cannot_be_made_from():
  with pytest.raises(ValueError, match=r'fit_decode: 2 samples cannot give 3'):
    fit_decode([DecodeSample(1, 1, 0.1)] * 2)
  with pytest.raises(ValueError, match=r'samples\[1\].seconds=0.0'):
    fit_link([LinkSample(1, 0.1), LinkSample(2, 0.0)], 'copy')
  with pytest.raises(ValueError, match="link='copy' times do not grow"):
    fit_link([LinkSample(1, 0.1), LinkSample(2**30, 0.1)], 'copy')


@pytest.mark.parametrize(
  # FAST'25 Figure 14, 8 x A800: tokens and seconds of an uncached prompt.
  ('num_tokens', 'seconds'),
  [(8192, 1.00), (16384, 2.05), (32768, 4.48), (65536, 10.58)],
)
def test_roofline_of_the_papers_testbed_is_near_its_prefill_times(
  num_tokens, seconds
):
  got = roofline().prompt_s(num_tokens, 0, num_tokens)
  assert got == pytest.approx(seconds, rel=0.2)


def test_roofline_of_an_h200_is_near_measured_kernels():
  # 8 x H200, bf16: medians of three backends' kernel tables, seconds.
  cost = roofline(flops_per_s=989e12, hbm_bytes_per_s=4.8e12)
  assert cost.prompt_s(8192, 0, 8192) == pytest.approx(0.335, rel=0.1)
  # 846, 852 and 1018 ms on a cached prefix of 120k tokens.
  assert 0.846 < cost.prefill_s(8192, 122880) < 1.1
  # Without overhead it is a lower bound of a step at batch 1 (8.2 ms).
  assert 0.5 * 0.0082 < cost.decode_step_s(1, 8192) < 0.0082


def test_decode_is_bound_by_memory_at_batch_1_and_by_compute_when_large():
  cost = roofline()
  small = cost.decode_step_s(2, 2) / cost.decode_step_s(1, 1)
  large = cost.decode_step_s(4096, 4096) / cost.decode_step_s(2048, 2048)
  assert small == pytest.approx(1, abs=0.01)
  assert large == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
  ('field', 'value'), [('mfu', 1.5), ('mbu', 0), ('num_devices', 0)]
)
def test_an_impossible_machine_is_named(field, value):
  with pytest.raises(ValueError, match=f'RooflineCost.{field}='):
    replace(roofline(), **{field: value})
