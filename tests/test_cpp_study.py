# SPDX-License-Identifier: Apache-2.0
"""What the notebook on chunk sizes shows is computed right."""

import pytest

from cost_pieces import polynomial
from cost_pieces import roofline
from mooncake_jax.report.listing import Listing
from scripts import cpp_study
from scripts.sweeps.grid import Point
from scripts.sweeps.table import SweepRow


def row(chunk, stages, chunking, seconds, tokens=8000) -> SweepRow:
  axes = {
    'ClusterSpec.chunk_tokens': chunk,
    'ClusterSpec.stages': stages,
    'distinct_prompts.num_tokens': tokens,
    'ClusterSpec.chunking': chunking,
  }
  return SweepRow(Point(axes, (), ''), {'ttft_s.mean': seconds})


ROWS = [
  row(1024, 1, 'fixed', 2.0),
  row(1024, 1, 'dynamic', 2.0),
  row(1024, 2, 'fixed', 1.4),
  row(2048, 2, 'fixed', 1.25),
  row(2048, 2, 'dynamic', 1.0),
]


def test_rows_are_found_by_the_short_names_of_their_axes():
  found = cpp_study.where(ROWS, stages=2, chunking='fixed')
  assert found == ROWS[2:4]
  assert cpp_study.best(found) is ROWS[3]


def test_a_line_tells_best_chunks_and_their_gain():
  listing = cpp_study.best_sizes(ROWS, roofline())
  two = dict(zip(listing.columns, listing.rows[1]))
  assert two['stages'] == '2' and two['best fixed chunk'] == '2048'
  assert two['speed-up'] == '1.6' and two['gain'] == '0.2'


def test_a_fit_to_a_polynomial_is_that_polynomial():
  want = polynomial()
  got = cpp_study.fitted(want, 100_000)
  assert got.prefill_s(3000, 5000) == pytest.approx(want.prefill_s(3000, 5000))


def test_a_fit_to_a_roofline_is_near_it():
  costs = roofline()
  got = cpp_study.fitted(costs, 128_000)
  for chunk, prefix in ((2048, 0), (4096, 30_000), (8192, 120_000)):
    want = costs.prefill_s(chunk, prefix)
    assert got.prefill_s(chunk, prefix) == pytest.approx(want, rel=0.02)


def test_a_plan_has_every_chunk_on_every_stage():
  spans = cpp_study.plan(polynomial(), 10_000, 4, 2048)
  assert {(s.chunk, s.stage) for s in spans} == {
    (c, s) for c in range(5) for s in range(4)
  }
  assert 0 < cpp_study.bubble_share(spans) < 1


def test_the_best_chunk_grows_with_what_every_chunk_costs():
  listing = cpp_study.overheads(roofline(), 32_000, 4, (0.001, 0.01, 0.1))
  sizes = [int(line[1]) for line in listing.rows]
  assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_measured_spans_begin_at_zero():
  spans = cpp_study.measured_spans([[(5.0, 6.0), (6.5, 7.0)]])
  first, second = cpp_study.from_zero(spans)
  assert (first.start_s, first.stop_s) == (0.0, 1.0)
  assert (second.stage, second.start_s) == (1, 1.5)


def test_figures_are_drawn(tmp_path):
  spans = cpp_study.plan(polynomial(), 10_000, 2, 2048)
  figures = [
    cpp_study.bubbles((2, 4)),
    cpp_study.parts(ROWS),
    cpp_study.charts({'one': spans, 'two': spans}),
  ]
  for i, figure in enumerate(figures):
    figure.savefig(tmp_path / f'{i}.png')
    assert (tmp_path / f'{i}.png').stat().st_size > 5000


def test_a_listing_is_markdown_and_text():
  listing = Listing(('a', 'b'), [(1, 0.123456), ('x', None)])
  assert listing._repr_markdown_().splitlines()[2] == '| 1 | 0.1235 |'
  assert repr(listing).splitlines()[2] == 'x       -'
