# SPDX-License-Identifier: Apache-2.0
"""Tokens of a step, all rows as one value: the same as row by row."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_jax.request import Emitted
from mooncake_jax.request import TokenLogprobs
from mooncake_jax.request import TokenSegment

SEGMENT = TokenSegment(1.0, 0.0, 1)
# (token, whether its log probability was asked for) of each row.
steps = st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=6)


def emitted(step, has_tokens: bool) -> Emitted:
  likely = tuple(TokenLogprobs(-1.0 - t) if asks else None for t, asks in step)
  return Emitted(
    tuple((f'r{i}', i % 2) for i in range(len(step))),
    SEGMENT,
    tuple(token for token, _ in step) if has_tokens else (),
    likely if has_tokens and any(likely) else (),
  )


@given(steps, st.booleans(), st.data())
def test_a_part_of_a_step_has_the_rows_of_that_part(step, has_tokens, data):
  whole = emitted(step, has_tokens)
  rows = [*whole.rows]
  assert len(rows) == len(step)
  for i, (row, (token, asks)) in enumerate(zip(rows, step)):
    assert (row.request_id, row.attempt) == whole.tries[i]
    assert row.segment is SEGMENT
    assert row.tokens == ((token,) if has_tokens else ())
    assert [found.logprob for found in row.logprobs] == (
      [-1.0 - token] if asks and has_tokens else []
    )
  places = data.draw(
    st.lists(st.sampled_from(range(len(step))), unique=True)
    if step
    else st.just([])
  )
  assert [*whole.of(places).rows] == [rows[i] for i in places]
