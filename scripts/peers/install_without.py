# SPDX-License-Identifier: Apache-2.0
"""Installs packages without some of what they ask for.

.venv-peers/vllm/bin/python scripts/peers/install_without.py FILE NAME...

FILE names packages, one a line; NAMEs are dependencies that are left out.
"""

from importlib import metadata
from pathlib import Path
import subprocess
import sys


def main(file: str, *left_out: str) -> None:
  pip('packaging')
  from packaging.requirements import Requirement

  lines = Path(file).read_text().splitlines()
  wanted = [line for line in lines if line and not line.startswith('#')]
  pip('--no-deps', *wanted)
  needs = []
  for line in wanted:
    for text in metadata.requires(Requirement(line).name) or ():
      need = Requirement(text)
      if need.name not in left_out and (
        need.marker is None or need.marker.evaluate({'extra': ''})
      ):
        need.marker = None
        needs.append(str(need))
  pip(*needs)


def pip(*arguments: str) -> None:
  command = [sys.executable, '-m', 'pip', 'install', '-q']
  subprocess.run([*command, *arguments], check=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
