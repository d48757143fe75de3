# SPDX-License-Identifier: Apache-2.0
"""The index benchmark asks and tells what a cluster would, and checks it."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow
from scripts.benches.index_stream import scores
from scripts.benches.index_stream import serving
from scripts.benches.index_turns import Program
from trace_strategies import traces_of


@settings(max_examples=30)
@given(
  traces_of(TOKENS_PER_HASH_ID, max_rows=20),
  st.integers(1, 3),
  st.integers(1, 20),
)
def test_our_answers_are_those_of_sets_of_blocks(rows, workers, capacity):
  stream = serving(rows, workers, capacity, holes=0.5)
  program = Program(stream.to_dict())
  program.build()
  for state, told in (
    ('whole', ''),
    ('holey', 'holes'),
    ('refilled', 'refills'),
  ):
    if told:
      program.hear(told)
    truth = scores(stream, state, 1)
    found = [program.scores(keys) for keys in program.queries]
    assert len(found) == len(rows)
    assert found == [{w: n for w, n in t.items() if n} for t in truth]


@given(traces_of(TOKENS_PER_HASH_ID, max_rows=20), st.integers(1, 20))
def test_a_worker_holds_no_more_than_it_can_and_stores_nothing_twice(
  rows, capacity
):
  most, held = max(capacity, max(len(row.hash_ids) for row in rows)), set()
  for kind, *about in serving(rows, 1, capacity, holes=0.5).ops:
    if kind == 'stored':
      _, parent, ids = about
      assert not held & set(ids) and (parent is None or parent in held)
      held |= set(ids)
    elif kind == 'removed':
      assert set(about[1]) <= held
      held -= set(about[1])
      assert len(held) <= most


def test_holes_are_in_the_middle_of_what_is_held():
  ids = [tuple(range(i * 10, i * 10 + 10)) for i in range(4)]
  rows = [TraceRow(0.0, 10 * TOKENS_PER_HASH_ID, 1, i) for i in ids]
  stream = serving(rows, 2, 1 << 20, holes=1.0)
  whole, holey = (scores(stream, state, 1) for state in ('whole', 'holey'))
  assert len(stream.holes) == 36  # of 40, all but the chains' last
  assert stream.num_distinct_blocks == 40
  assert any(a != b for a, b in zip(whole, holey))
  assert scores(stream, 'refilled', 1) == whole
