# SPDX-License-Identifier: Apache-2.0
"""Records as Parquet: the same ones again, and readable by others."""

from dataclasses import fields
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from mooncake_jax.report import parquet
from mooncake_jax.report.records import read_records
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from scripts import run

SIM = 'configs/run/sim_conversation.gin'
FEW = 'generate.conversation.num_requests=40'
SECONDS = st.floats(0, 1e6)
SEGMENTS = st.builds(
  TokenSegment, SECONDS, SECONDS, st.integers(1, 10**6), SECONDS
)
RECORDS = st.builds(
  RequestRecord,
  st.text(min_size=1),
  st.integers(1, 10**6),
  SECONDS,
  prefill=st.none() | st.just('prefill0'),
  outcome=st.sampled_from(['completed', 'running', 'rejected_late']),
  reused_tokens=st.dictionaries(
    st.sampled_from(['local_host', 'remote_host']), st.integers(1, 9)
  ),
  reuse_known=st.booleans(),
  predicted_ttft_s=st.none() | SECONDS,
  first_token_s=st.none() | SECONDS,
  segments=st.lists(SEGMENTS, max_size=3),
  output_tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)


@settings(max_examples=25, deadline=None)
@given(records=st.lists(RECORDS, max_size=4))
def test_records_survive_parquet(tmp_path_factory, records):
  pytest.importorskip('pyarrow')
  path = tmp_path_factory.mktemp('parquet') / 'records.parquet'
  parquet.write_parquet(path, records)
  assert parquet.read_parquet(path) == records


def test_columns_are_the_fields_and_figures_with_plain_types(tmp_path):
  read_table = pytest.importorskip('pyarrow.parquet').read_table
  path = tmp_path / 'records.parquet'
  two = [TokenSegment(2.0, 0.5, 3), TokenSegment(4.0, 0.0, 1)]
  parquet.write_parquet(path, [RequestRecord('a', 9, 1.0, segments=two)])
  found = read_table(path)
  names = [field.name for field in fields(RequestRecord)]
  assert found.column_names == [*names, *parquet.DERIVED]
  (row,) = found.to_pylist()
  assert row['num_output_tokens'] == 4
  assert row['tbt_tail_s'] == 1.0 and row['tpot_s'] == pytest.approx(2 / 3)
  assert row['segments'][0] == {
    'first_s': 2.0,
    'interval_s': 0.5,
    'count': 3,
    'growth_s': 0.0,
  }
  types = {field.name: str(field.type) for field in found.schema}
  assert types['finished_s'] == 'double' and types['attempt'] == 'int64'
  assert types['outcome'] == 'string' and types['reuse_known'] == 'bool'


def test_a_table_without_a_field_is_told(tmp_path):
  pa = pytest.importorskip('pyarrow')
  write_table = pytest.importorskip('pyarrow.parquet').write_table
  path = tmp_path / 'other.parquet'
  write_table(pa.table({'request_id': ['a']}), path)
  with pytest.raises(ValueError, match='column prompt_tokens is missing'):
    parquet.read_parquet(path)


def test_a_run_leaves_the_same_records_in_both(tmp_path):
  pytest.importorskip('pyarrow')
  options = ['--bind', FEW, '--out', str(tmp_path), '--parquet']
  assert run.main([SIM, *options]) == 0
  records = parquet.read_parquet(tmp_path / 'records.parquet')
  assert len(records) == 40
  assert records == read_records(tmp_path / 'records.jsonl')


def test_without_pyarrow_a_run_says_so_before_it_begins(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  out = tmp_path / 'out'
  with pytest.raises(SystemExit, match='1'):
    run.main([SIM, '--bind', FEW, '--out', str(out), '--parquet'])
  assert 'pip install' in capsys.readouterr().err
  assert not out.exists()
