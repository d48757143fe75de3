# SPDX-License-Identifier: Apache-2.0
"""Commands that pages show: whether they name what there is."""

import importlib
from itertools import pairwise
from pathlib import Path
import re
import shlex

from scripts import bench
from scripts.assessment.spec import Assessment
from scripts.config import load
from scripts.experiment import Experiment
from scripts.sweep import read_sweep
from scripts.sweeps.grid import points

ROOT = Path(__file__).resolve().parents[1]


def shown(text: str) -> list[str]:
  """Lines of a page's shell blocks."""
  blocks = re.findall(r'```sh\n(.*?)```', text, re.S)
  return [line for block in blocks for line in block.splitlines()]


def check(command: str) -> None:
  """Fails where it names a script, a config, a binding that there is not."""
  words = shlex.split(command)
  if words[0] == 'make':
    assert f'\n{words[1]}:' in (ROOT / 'Makefile').read_text()
    return
  assert words[0] == '.venv/bin/python' and (ROOT / words[1]).is_file()
  script, args = Path(words[1]).stem, words[2:]
  options = {word for word in args if word.startswith('--')}
  source = importlib.import_module(f'scripts.{script}').__doc__ or ''
  text = source + (ROOT / words[1]).read_text()
  assert all(option in text for option in options), options
  if script in ('run', 'break_even'):
    load(args[0], _values(args, '--bind'), Experiment)
  if script == 'assess':
    (config,) = _values(args, '--config')
    load(config, _values(args, '--bind'), Assessment)
  if script == 'sweep':
    over, bind = _values(args, '--over'), _values(args, '--bind')
    assert not any(
      p.reason for p in points(read_sweep(args[0], over, bind, []))
    )
  if script == 'bench':
    assert set(args) - options <= set(bench.BENCHES)


def _values(args: list[str], option: str) -> list[str]:
  return [value for name, value in pairwise(args) if name == option]
