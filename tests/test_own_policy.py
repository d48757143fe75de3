# SPDX-License-Identifier: Apache-2.0
"""An eviction policy in a user's own file, bound by gin: docs/how_to.md's."""

import json
import re

from scripts import run as run_script
from scripts.config import load
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.sweep import read_sweep
from scripts.sweeps.grid import points

PAGE = (ROOT / 'docs/how_to.md').read_text()
SMALL = (
  'generate.conversation.num_requests=300',
  'ClusterSpec.host_bytes=40_000_000_000',
)


def block(kind: str, first: str) -> str:
  """The page's only code block of a kind that begins so."""
  (found,) = re.findall(rf'```{kind}\n({re.escape(first)}.*?)```', PAGE, re.S)
  return found


def hit_rate(config, tmp_path, name, *bindings) -> float:
  binds = [text for each in (*SMALL, *bindings) for text in ('--bind', each)]
  out = tmp_path / name
  assert run_script.main([str(config), *binds, '--out', str(out)]) == 0
  return json.loads((out / 'summary.json').read_text())['hit_rate']


def test_the_pages_policy_runs_without_a_change_to_the_library(
  tmp_path, monkeypatch
):
  (tmp_path / 'my_eviction.py').write_text(block('python', '# my_eviction.py'))
  config = tmp_path / 'mine.gin'
  config.write_text(block('', '# mine.gin'))
  monkeypatch.syspath_prepend(tmp_path)
  mine = hit_rate(config, tmp_path, 'mine')
  base = 'configs/run/sim_conversation.gin'
  assert mine != hit_rate(base, tmp_path, 'lru')
  # What it left behind builds the same.
  again = tmp_path / 'mine/operative_config.gin'
  assert hit_rate(again, tmp_path, 'again') == mine
  experiment, _ = load(again, (), Experiment)
  assert callable(experiment.cluster.eviction)
  (over,) = re.findall(r'sweep.py mine.gin --over "(.*?)"', PAGE)
  swept = points(read_sweep(str(config), [over], [], []))
  assert len({point.name for point in swept}) == 3
  assert not any(point.reason for point in swept)
