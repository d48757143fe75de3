# SPDX-License-Identifier: Apache-2.0
"""README.md's commands exist and its figures are those of the run files."""

from pathlib import Path
import re

import pytest

import commands
from scripts import readme

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / 'README.md').read_text()
COMMANDS = commands.shown(TEXT)


def test_the_table_of_runs_is_up_to_date():
  assert readme.with_table(TEXT) == TEXT, 'run scripts/readme.py'


@pytest.mark.parametrize('command', COMMANDS)
def test_a_command_names_what_there_is(command):
  commands.check(command)


def test_files_to_read_first_are_there():
  named = re.findall(r'^\d\. `(.*?)`', TEXT, re.M)
  assert len(named) == 6 and all((ROOT / name).is_file() for name in named)
