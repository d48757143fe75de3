# SPDX-License-Identifier: Apache-2.0
"""Traces: reading, refusing, scaling."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import json
import logging
from pathlib import Path
import pickle

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from mooncake_jax.workload.generate import distinct_prompts
from mooncake_jax.workload.scale import scale_trace
from mooncake_jax.workload.scale import TraceScale
from mooncake_jax.workload.trace import load_trace
from mooncake_jax.workload.trace import parse_row
from mooncake_jax.workload.trace import TraceRow
from mooncake_jax.workload.trace import TraceSource
from mooncake_jax.workload.trace import write_trace
from tests.trace_strategies import traces_of


def line(**changes) -> str:
  fields = {
    'timestamp': 3000,
    'input_length': 1300,
    'output_length': 52,
    'hash_ids': [0, 7, 9],
  }
  return json.dumps({**fields, **changes})


# Reading.


def test_a_line_becomes_a_row_in_seconds():
  row = parse_row(line(), 'a.jsonl', 1)
  assert row == TraceRow(3.0, 1300, 52, (0, 7, 9))


@pytest.mark.parametrize(
  ('text', 'error'),
  [
    (line(hash_ids=[0, 7]), r'len\(hash_ids\)=2 but input_length=1300 makes 3'),
    (line(hash_ids=[]), r'len\(hash_ids\)=0 but'),
    (line(input_length=0, hash_ids=[]), 'input_length=0 must be an integer'),
    (line(input_length=-5), 'input_length=-5 must be'),
    (line(input_length=1300.5), 'input_length=1300.5 must be'),
    (line(input_length=True), 'input_length=True must be'),
    (line(output_length='7'), "output_length='7' must be"),
    (line(output_length=10**300), None),
    (line(input_length=10**300), 'but input_length=1000'),
    (line(timestamp=-1), 'timestamp=-1 must be'),
    (line(timestamp=float('nan')), 'timestamp=nan must be'),
    (line(timestamp=10**400), 'timestamp=1000'),
    (line(hash_ids=[0, -7, 9]), r'hash_ids\[1\]=-7 must be'),
    (line(hash_ids=[0, 7.5, 9]), r'hash_ids\[1\]=7.5 must be'),
    (line(hash_ids=[0, 2**63, 9]), r'hash_ids\[1\]=9223372036854775808 must'),
    (line(hash_ids='079'), "hash_ids='079' must be a list"),
    ('{"timestamp": 1}', 'input_length is missing'),
    ('[1, 2]', r'not a JSON object: \[1, 2\]'),
    ('{"timestamp": 1,', 'not JSON'),
    (b'\xff\xfe\x00', 'not JSON'),
    ('[' * 100_000, 'not JSON'),
  ],
)
def test_a_line_that_lies_is_named_with_file_line_field_and_value(text, error):
  if error is None:
    parse_row(text, 'a.jsonl', 17)
    return
  with pytest.raises(ValueError, match=error) as caught:
    parse_row(text, 'a.jsonl', 17)
  message = str(caught.value)
  assert message.startswith('a.jsonl:17: ')
  assert '\n' not in message and len(message) < 250


def test_bad_rows_are_counted_and_the_others_go_on(tmp_path: Path):
  path = tmp_path / 'trace.jsonl'
  path.write_text(f'{line()}\n\nnonsense\n   \n{line(hash_ids=[1])}\n{line()}')
  rows, errors = load_trace(path)
  assert len(rows) == 2
  assert [error.split(': ')[0] for error in errors] == [
    f'{path}:3',
    f'{path}:5',
  ]


def test_timestamps_that_go_backwards_are_kept_and_noted(tmp_path, caplog):
  path = tmp_path / 'trace.jsonl'
  path.write_text('\n'.join(line(timestamp=t) for t in (5000, 1000, 2000)))
  with caplog.at_level(logging.WARNING):
    rows, errors = load_trace(path)
  assert [row.timestamp_s for row in rows] == [5.0, 1.0, 2.0]
  assert not errors
  assert caplog.messages == [f'{path}: timestamp goes backwards at 1 rows']


def test_a_missing_file_is_named(tmp_path: Path):
  with pytest.raises(FileNotFoundError, match='nowhere.jsonl'):
    load_trace(tmp_path / 'nowhere.jsonl')


@settings(max_examples=20, deadline=None)
@given(traces_of(512))
def test_what_is_written_reads_back_the_same(tmp_path_factory, rows):
  path = tmp_path_factory.mktemp('trace') / 'trace.jsonl'
  write_trace(path, rows)
  assert load_trace(path) == (rows, [])


def test_a_source_is_read_by_many_threads_and_after_pickling(tmp_path: Path):
  path = tmp_path / 'trace.jsonl'
  path.write_text('\n'.join(line(timestamp=i) for i in range(500)))
  source = TraceSource(path)
  order = [i % 500 for i in range(0, 5000, 7)]
  with ThreadPoolExecutor(16) as pool:
    rows = list(pool.map(source.__getitem__, order))
  assert [row.timestamp_s for row in rows] == [i / 1000 for i in order]
  assert pickle.loads(pickle.dumps(source))[499] == source[-1]
  with pytest.raises(IndexError):
    source[500]


def test_grain_reads_a_source(tmp_path: Path):
  grain = pytest.importorskip('grain')
  path = tmp_path / 'trace.jsonl'
  path.write_text('\n'.join(line(timestamp=i) for i in range(100)))
  source = TraceSource(path)
  shuffled = grain.MapDataset.source(source).shuffle(seed=3)
  assert [row.timestamp_s for row in shuffled[:5]] != [
    row.timestamp_s for row in source[:5]
  ]
  assert {row.timestamp_s for row in shuffled.to_iter_dataset()} == {
    row.timestamp_s for row in source
  }


# Scaling.


@settings(deadline=None)
@given(traces_of(512), st.sampled_from([2, 3, 4, 16, 32, 64, 512, 1024]))
def test_length_scale_keeps_block_counts_and_which_blocks_are_complete(
  rows, tokens
):
  got = scale_trace(rows, TraceScale(length_scale=tokens / 512))
  assert got.tokens_per_hash_id == tokens
  for old, new in zip(rows, got.rows):
    assert new.hash_ids == old.hash_ids
    assert len(new.hash_ids) == -(-new.input_tokens // tokens)
    assert new.input_tokens // tokens == old.input_tokens // 512
    assert abs(new.input_tokens - old.input_tokens * tokens / 512) <= 1


def test_the_module_docstring_example():
  rows = [TraceRow(0, 1300, 160, (0, 7, 9)), TraceRow(1, 1024, 8, (0, 7))]
  got = scale_trace(rows, TraceScale(length_scale=1 / 16))
  assert [row.input_tokens for row in got.rows] == [81, 64]
  assert [row.output_tokens for row in got.rows] == [10, 1]


def test_a_slice_starts_at_zero_and_time_scale_2_is_twice_as_fast():
  rows = [TraceRow(float(t), 10, 5, (t,)) for t in range(100)]
  scale = TraceScale(start_s=20, duration_s=10, time_scale=2.0)
  got = scale_trace(rows, scale).rows
  assert [row.hash_ids[0] for row in got] == list(range(20, 30))
  assert [row.timestamp_s for row in got] == [t / 2 for t in range(10)]


def test_long_prompts_are_dropped_or_cut_and_counted():
  rows = [TraceRow(0, 1300, 900, (0, 7, 9)), TraceRow(1, 40, 8, (1,))]
  drop = TraceScale(max_prompt_tokens=600, max_output_tokens=100)
  dropped = scale_trace(rows, drop)
  assert (dropped.num_dropped, dropped.num_cut) == (1, 0)
  assert dropped.rows == rows[1:]
  cut = scale_trace(rows, replace(drop, too_long='cut'))
  assert (cut.num_dropped, cut.num_cut) == (0, 1)
  assert cut.rows == [TraceRow(0, 600, 100, (0, 7)), rows[1]]


def test_num_requests_counts_what_is_left():
  rows = [TraceRow(float(t), 10 + 100 * (t % 2), 5, (t,)) for t in range(20)]
  scale = TraceScale(max_prompt_tokens=50, num_requests=5)
  assert [row.hash_ids[0] for row in scale_trace(rows, scale).rows] == [
    0, 2, 4, 6, 8,
  ]  # fmt: skip


def test_jitter_is_seeded_spreads_ticks_and_keeps_rows():
  rows = [TraceRow(3.0 * (i // 10), 10, 5, (i,)) for i in range(200)]
  one, same, other = (
    scale_trace(rows, TraceScale(jitter_s=3.0, seed=s)).rows for s in (1, 1, 2)
  )
  assert one == same != other
  times = [row.timestamp_s for row in one]
  assert times == sorted(times) and len(set(times)) == 200
  for row in one:
    assert 0 <= row.timestamp_s - 3.0 * (row.hash_ids[0] // 10) < 3.0


def test_repeats_are_the_same_load_with_blocks_of_their_own():
  rows = [TraceRow(1.0, 600, 5, (0, 7)), TraceRow(3.0, 512, 5, (0,))]
  got = scale_trace(rows, TraceScale(repeats=3)).rows
  assert [row.timestamp_s for row in got] == [1, 3, 5.5, 7.5, 10, 12]
  firsts = [row.hash_ids[0] for row in got]
  assert firsts == [0, 0, 8, 8, 16, 16]
  assert {row.input_tokens for row in got} == {600, 512}
  with pytest.raises(ValueError, match='TraceScale.repeats=0'):
    TraceScale(repeats=0)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('time_scale', 0),
    ('length_scale', -1.0),
    ('num_requests', 2.5),
    ('max_prompt_tokens', 0),
    ('too_long', 'clip'),
    ('start_s', -1),
  ],
)
def test_a_senseless_scale_is_named(field, value):
  with pytest.raises(ValueError, match=f'TraceScale.{field}='):
    TraceScale(**{field: value})


@pytest.mark.parametrize('length_scale', [1 / 3, 1 / 512, 1.0001])
def test_a_length_scale_without_whole_blocks_is_named(length_scale):
  with pytest.raises(ValueError, match='TraceScale.length_scale='):
    scale_trace([], TraceScale(length_scale=length_scale))


def test_distinct_prompts_share_nothing_and_keep_their_length():
  rows = distinct_prompts(1300, count=3, interval_s=2.0)
  assert [row.timestamp_s for row in rows] == [0.0, 2.0, 4.0]
  ids = [i for row in rows for i in row.hash_ids]
  assert len(ids) == len(set(ids)) == 9
  with pytest.raises(ValueError, match='num_tokens=0'):
    distinct_prompts(0)
