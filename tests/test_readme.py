# SPDX-License-Identifier: Apache-2.0
"""README.md's commands exist, and docs/runs.md has the run files' figures."""

from pathlib import Path
import re

import pytest

import commands
from scripts import runs_page

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text()
COMMANDS = commands.shown(TEXT)


def test_the_table_of_runs_is_up_to_date():
  page = runs_page.PAGE.read_text()
  assert runs_page.with_table(page) == page, 'run scripts/runs_page.py'


@pytest.mark.parametrize('command', COMMANDS)
def test_a_command_names_what_there_is(command):
  commands.check(command)


def test_paths_are_there():
  roots = 'scripts|configs|notebooks|docs|mooncake_jax'
  named = set(re.findall(rf'\b((?:{roots})/[\w/]+\.\w+)', TEXT))
  assert len(named) > 20
  assert not [name for name in named if not (ROOT / name).is_file()]


def test_files_to_read_first_are_there():
  named = re.findall(r'^\d\. `(.*?)`', TEXT, re.M)
  assert len(named) == 6 and all((ROOT / name).is_file() for name in named)
