# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md defines what summary.json and records.jsonl really have."""

import json
import re

import pytest

from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.running import run

PAGE = (ROOT / 'docs/metrics.md').read_text()
FIGURES, RECORDS = PAGE.split('\n## Records\n')


def defined(text: str) -> list[str]:
  """Names in the first column of all tables."""
  cells = re.findall(r'^\| (`.*?) \| ', text, re.M)
  return [name for cell in cells for name in re.findall(r'`(.*?)`', cell)]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  folder = tmp_path_factory.mktemp('results')
  few = ('conversation.num_requests=30',)
  experiment, operative = load(
    'configs/run/sim_conversation.gin', few, Experiment
  )
  run(experiment, operative, folder, with_page=False)
  return folder


def test_every_figure_of_a_summary_is_defined_once(results):
  summary = json.loads((results / 'summary.json').read_text())
  names = defined(FIGURES)
  assert sorted(names) == sorted(summary)
  for name, value in summary.items():
    if name.endswith('_s') and isinstance(value, dict):
      assert [*value] == ['mean', 'p50', 'p90', 'p99'], name
  tiers = re.findall(r'`(\w+)`', FIGURES.split('`hit_rate_by_tier`')[1])[:5]
  assert set(summary['hit_rate_by_tier']) <= set(tiers)


def test_every_field_of_a_record_is_defined_once(results):
  first = (results / 'records.jsonl').read_text().split('\n')[0]
  assert sorted(defined(RECORDS)) == sorted(json.loads(first))


def test_counts_add_up_as_the_page_says(results):
  summary = json.loads((results / 'summary.json').read_text())
  kinds = 'rejected rejected_late completed failed cancelled'.split()
  assert sum(summary[kind] for kind in kinds) == summary['offered'] == 30
  assert summary['effective_per_s_per_instance'] == pytest.approx(
    summary['effective'] / summary['duration_s'] / 16
  )
