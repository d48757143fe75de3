# SPDX-License-Identifier: Apache-2.0
"""Costs as a table: what was measured, lines in between, and from files."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from cost_pieces import polynomial
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import LinkSample
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.points import Lane
from mooncake_jax.costs.points import load_points
from mooncake_jax.costs.points import Points
from mooncake_jax.costs.points import write_points
from mooncake_jax.costs.table import Line
from mooncake_jax.costs.table import load_table
from mooncake_jax.costs.table import table_of
from test_fit_points import costs_of
from test_fit_points import PAPER
from test_fit_points import tables

TRUE = polynomial()
SIZES, BATCHES = (128, 512, 1024, 4096), (1, 8, 64)
POINTS = Points(
  [
    PrefillSample(x, L, TRUE.prefill_s(x, L))
    for x in SIZES
    for L in (0, 4096, 65536)
  ],
  [
    DecodeSample(b, b * s, TRUE.decode_step_s(b, b * s))
    for b in BATCHES
    for s in (64, 4096)
  ],
  {'copy': [LinkSample(n, TRUE.transfer_s(n, 'copy')) for n in (10**6, 10**9)]},
)
LANE = Lane('cpu', 'a model', 1, 'mooncake_jax')
TABLE = table_of(POINTS, TRUE)


def test_what_was_measured_comes_out_again():
  for x, L, seconds in POINTS.prefill:
    assert TABLE.prefill_s(x, L) == pytest.approx(seconds)
  for rows, context, seconds in POINTS.decode:
    assert TABLE.decode_step_s(rows, context) == pytest.approx(seconds)
  assert TABLE.transfer_s(999, 'copy') == TRUE.transfer_s(999, 'copy')


@given(st.integers(1, 10_000), st.integers(1, 200_000))
def test_between_and_beyond_lie_lines(size, tokens):
  got = TABLE.prefill_s(size, tokens)
  inside = min(max(size, 128), 4096)
  low = max(s for s in SIZES if s <= inside)
  high = min(s for s in SIZES if s >= inside)
  ends = [TABLE.prefill_s(s, tokens) for s in (low, high)]
  if size == inside:
    assert min(ends) * (1 - 1e-9) <= got <= max(ends) * (1 + 1e-9)
  elif size < 128:
    assert got == ends[0]
  else:
    last = TABLE.prefill_s(4096, tokens) - TABLE.prefill_s(1024, tokens)
    want = ends[1] + last * (size - 4096) / 3072
    assert got == pytest.approx(want)


@given(st.integers(1, 300), st.integers(0, 10**6))
def test_steps_are_linear_in_the_context_of_a_batch(rows, context):
  a, b, c = (TABLE.decode_step_s(rows, context + i * rows) for i in range(3))
  assert b - a == pytest.approx(c - b, abs=1e-12)
  assert b >= a


def test_a_size_with_one_length_has_the_slope_of_all():
  lone = PrefillSample(2048, 0, TRUE.prefill_s(2048, 0))
  table = table_of(POINTS._replace(prefill=[*POINTS.prefill, lone]), TRUE)
  want = TRUE.prefill_s(2048, 50_000)
  assert table.prefill_s(2048, 50_000) == pytest.approx(want)


def test_points_of_a_size_count_by_their_percentage():
  points = [PrefillSample(512, L, s) for L, s in ((0, 1), (1000, 4), (2000, 4))]
  others = [each for each in POINTS.prefill if each.chunk_tokens != 512]
  table = table_of(POINTS._replace(prefill=[*others, *points]), TRUE)
  (line,) = [line for line in table.prefill if line.size == 512]

  def error(base_s: float, s_per_token: float) -> float:
    return sum(((base_s + s_per_token * L) / s - 1) ** 2 for _, L, s in points)

  least = error(line.base_s, line.s_per_token)
  for base_s in (0.999, 1.001):
    assert least < error(base_s * line.base_s, line.s_per_token)


def test_points_survive_their_file(tmp_path):
  path = tmp_path / 'points.csv'
  write_points(path, LANE, POINTS)
  ((lane, found),) = load_points(path).items()
  assert lane == LANE
  for got, want in zip(found[:2], POINTS[:2]):
    assert np.array(got) == pytest.approx(np.array(want))
  assert found.links.keys() == POINTS.links.keys()
  table = load_table(str(path), TRUE)
  assert np.array(table.prefill) == pytest.approx(np.array(TABLE.prefill))


def test_kernels_that_change_with_the_batch_are_followed():
  """Held out of the published tables; a polynomial has 3.1 % here."""
  errors = []
  for prefill, decode, _ in load_points(tables()).values():
    table = table_of(Points(prefill, decode[::2], {}), TRUE)
    errors += [
      table.decode_step_s(rows, context) / seconds - 1
      for rows, context, seconds in decode[1::2]
    ]
  assert np.abs(errors).mean() <= 0.025


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'prefill': ()}, 'TableCost.prefill: sizes='),
    ({'decode': (Line(2, 1.0, 0.0), Line(1, 1.0, 0.0))}, 'sizes=.* must rise'),
    ({'decode': (Line(0, 1.0, 0.0),)}, r'TableCost.decode\[0\].size=0'),
    ({'prefill': (Line(1, 1.0, -1.0),)}, r'prefill\[0\].s_per_token=-1.0'),
  ],
)
def test_a_senseless_table_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    replace(TABLE, **changes)


def test_a_file_of_several_lanes_is_no_table():
  with pytest.raises(ValueError, match='30 lanes, must be one'):
    load_table(str(tables()), TRUE)


def test_the_papers_breakdown_as_a_table_is_what_it_says(tmp_path):
  costs = costs_of('a800_x8_table.gin', tmp_path)
  (points,) = load_points(PAPER).values()
  for chunk, prefix, seconds in points.prefill:
    assert costs.prefill_s(chunk, prefix) == pytest.approx(seconds)
  assert costs.transfer_s(0, 'onload') > 0
