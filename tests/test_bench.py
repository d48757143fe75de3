# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows, and the exit status that they decide."""

import json
from typing import Any

import numpy as np
import pytest

from scripts import bench
from scripts.benches.rows import Point
from scripts.benches.rows import Row


@pytest.fixture
def table(monkeypatch):
  """Puts functions in place of the real, slow benchmarks."""
  benches = {
    'good': lambda quick: [Row('a', 2.0, 's', target=3.0, at_most=True)],
    'bad': lambda quick: [Row('b', 0.4, 'ratio', 'limit', target=0.5)],
  }
  monkeypatch.setattr(bench, 'BENCHES', benches)


def test_a_missed_target_is_the_exit_status(table, capsys):
  assert bench.main(['good']) == 0
  assert bench.main(['good', 'bad']) == 1
  assert 'NO' in capsys.readouterr().out


def test_rows_and_environment_are_written(table, tmp_path):
  path = tmp_path / 'rows.json'
  bench.main(['bad', 'good', '--json', str(path)])
  found = json.loads(path.read_text())
  assert found['rows'][0] == {
    'metric': 'b',
    'value': 0.4,
    'unit': 'ratio',
    'reference': 'limit',
    'target': 0.5,
    'ok': False,
  }
  assert found['environment']['versions']['jax']


def test_numbers_of_numpy_are_written_as_numbers():
  values: list[Any] = [np.float64(0.5), np.int64(1), np.float32(0.5)]
  for value in values:
    row = Row('x', value, 'ratio', target=2.0, at_most=True)
    assert json.loads(json.dumps(row.to_dict()))['ok'] is True


def test_an_unknown_benchmark_is_an_error(table):
  with pytest.raises(SystemExit):
    bench.main(['nothing'])


def test_series_stand_side_by_side_and_are_drawn(monkeypatch, tmp_path, capsys):
  rows = [
    Row(f'{way}.{size}', speed, 'B/s', point=Point('put 1x1', way, size))
    for way, speed in (('ours', 5e9), ('memcpy', 2e10))
    for size in (1 << 16, 1 << 20)
  ]
  monkeypatch.setattr(bench, 'BENCHES', {'swept': lambda quick: rows})
  drawn = tmp_path / 'a.svg'
  found = tmp_path / 'rows.json'
  command = ['swept', '--plot', str(drawn), '--json', str(found)]
  assert bench.main(command) == 0
  assert '<svg' in drawn.read_text() and 'put 1x1' in capsys.readouterr().out
  point = json.loads(found.read_text())['rows'][0]['point']
  assert point == {'panel': 'put 1x1', 'way': 'ours', 'size_bytes': 1 << 16}


def test_a_plot_of_nothing_is_an_error(table, tmp_path):
  with pytest.raises(ValueError, match='no series'):
    bench.main(['good', '--plot', str(tmp_path / 'a.png')])
