# SPDX-License-Identifier: Apache-2.0
"""README.md's commands exist and its figures are those of the run files."""

from pathlib import Path
import re
import shlex

import pytest

from scripts import bench
from scripts import readme
from scripts.config import load
from scripts.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text()
COMMANDS = [
  line
  for block in re.findall(r'```sh\n(.*?)```', TEXT, re.S)
  for line in block.splitlines()
]


def test_the_table_of_runs_is_up_to_date():
  assert readme.with_table(TEXT) == TEXT, 'run scripts/readme.py'


@pytest.mark.parametrize('command', COMMANDS)
def test_a_command_names_what_there_is(command):
  words = shlex.split(command)
  if words[0] == 'make':
    assert f'\n{words[1]}:' in (ROOT / 'Makefile').read_text()
    return
  assert words[0] == '.venv/bin/python' and (ROOT / words[1]).is_file()
  if words[1] == 'scripts/run.py':
    bindings = (
      words[words.index('--bind') + 1 :][:1] if '--bind' in words else []
    )
    load(words[2], bindings, Experiment)
  if words[1] == 'scripts/bench.py':
    assert set(words[2:-1]) <= set(bench.BENCHES)


def test_files_to_read_first_are_there():
  named = re.findall(r'^\d\. `(.*?)`', TEXT, re.M)
  assert len(named) == 6 and all((ROOT / name).is_file() for name in named)
