# SPDX-License-Identifier: Apache-2.0
"""scripts/assess.py on small workloads, from the command line to the page."""

from dataclasses import replace
from html.parser import HTMLParser
import json

import pytest

from mooncake_jax.workload.clients import client_mix
from mooncake_jax.workload.trace import write_trace
from scripts import assess as script
from scripts.assessment.alternatives import groupings
from scripts.assessment.alternatives import with_cpp
from scripts.assessment.spec import Assessment
from scripts.assessment.spec import enough
from scripts.assessment.spec import sized
from scripts.config import load
from scripts.gin_source import ROOT
from scripts.workloads import Rows

CONFIG = 'configs/assess/a800.gin'
SMALL = (
  'Assessment.num_requests=20',
  'Assessment.nodes=2',
  'Assessment.tolerance=0.9',
)


class Links(HTMLParser):
  """Everything that a page would fetch."""

  def __init__(self):
    super().__init__()
    self.found = []

  def handle_starttag(self, tag, attrs):
    self.found += [
      value
      for name, value in attrs
      if name in ('src', 'href') and not str(value).startswith('#')
    ]


def run(tmp_path, *args):
  binds = [text for each in SMALL for text in ('--bind', each)]
  out = ['--out', str(tmp_path / 'out'), '--workers', '1']
  assert script.main([*args, '--config', CONFIG, *binds, *out]) == 0
  page = (tmp_path / 'out/report.html').read_text()
  return json.loads((tmp_path / 'out/assessment.json').read_text()), page


def test_a_trace_of_lengths_alone_says_what_it_cannot_know(tmp_path, capsys):
  path = tmp_path / 'azure.csv'
  lines = [
    f'2023-11-16 18:{i // 60:02}:{i % 60:02}.5000000,{900 + i},{20 + i % 30}'
    for i in range(60)
  ]
  path.write_text(
    'TIMESTAMP,ContextTokens,GeneratedTokens\n' + '\n'.join(lines)
  )
  found, page = run(tmp_path, str(path))
  assert found['verdict']['answer'] == 'unknown' and found['reuse'] is None
  assert (
    'cannot be known' in page and 'cannot be known' in capsys.readouterr().out
  )
  links = Links()
  links.feed(page)
  assert links.found == []
  families = {s['family'] for s in found['systems']}
  assert families == {'coupled', 'apart', 'store'}
  assert all(s['hit_rate'] in (None, 0) for s in found['systems'])
  assert found['simulated']['num_requests'] == 20
  supposed = found['supposed']
  assert [each['share'] for each in supposed] == [0.25, 0.5, 1.0]
  assert supposed[-1]['hit_rate'] > 0.3  # of what blocks of 256 allow
  assert any('hit rate' in r for r in found['verdict']['reasons'])
  assert any('CPP is left out' in d for d in found['verdict']['doubts'])
  assert all('CPP' not in s['name'] for s in found['systems'])
  assert any('Simulated are 20 of 60' in d for d in found['verdict']['doubts'])


def test_without_reuse_no_store_is_advised(tmp_path):
  path = tmp_path / 'alone.jsonl'
  write_trace(path, client_mix(30, 2.0))
  found, _ = run(tmp_path, str(path))
  assert found['reuse']['hit_rate'] == 0.0
  assert found['verdict']['answer'] in ('no', 'apart_only', 'no_store')


def test_all_systems_have_the_same_hardware():
  spec, _ = load(CONFIG, (), Assessment)
  alone = spec.experiment.cluster
  assert groupings(2, 1) == []
  for nodes in range(3, 12):
    assert {*groupings(3, 1)} == {(2, 1)}
    for stages, groups in groupings(nodes, nodes // 2):
      cpp = with_cpp(spec, nodes, stages, groups)
      cluster, prefill = cpp.cluster, stages * groups
      assert stages >= 2 and cluster.stages == stages
      assert cluster.decode_instances == nodes - prefill >= 1
      assert cluster.host_bytes * groups == alone.host_bytes * prefill
      wide, costs = cpp.instances['prefill0'], cpp.costs
      alone_s = costs.transfer_s(10**12, 'copy')
      assert stages * wide.transfer_s(10**12, 'copy') == pytest.approx(
        alone_s, rel=1e-3
      )
      assert wide.prefill_s(512, 0) == costs.prefill_s(512, 0)


@pytest.mark.parametrize(
  'path', sorted((ROOT / 'configs/assess').glob('*.gin')), ids=lambda p: p.stem
)
def test_every_config_builds_and_is_sized(path):
  spec, _ = load(path, (), Assessment)
  rows = spec.experiment.workload.rows  # pyright: ignore
  assert sized(spec, Rows(rows, [])) >= 2
  assert str(path.relative_to(ROOT)) in path.read_text()  # its command


def test_a_light_load_is_simulated_longer():
  spec, _ = load('configs/assess/h100.gin', (), Assessment)
  rows = Rows(client_mix(3000, 5.0), [])
  few = enough(spec, rows, 2)
  assert 1000 <= few <= enough(spec, rows, 20) <= 4000
  assert enough(replace(spec, num_requests=7), rows, 2) == 7


def test_what_cannot_be_assessed_is_named(tmp_path, capsys):
  for binding, said in (
    ('Assessment.nodes=1', 'nodes=1 must be >= 2'),
    ("Assessment.admission='x'", "admission='x' is not one of"),
    ('generate.conversation.num_requests=1', 'nothing to assess'),
  ):
    with pytest.raises(SystemExit):
      script.main(['--config', CONFIG, '--bind', binding])
    assert said in capsys.readouterr().err
