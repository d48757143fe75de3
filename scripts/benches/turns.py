# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own that are measured in turns.

See `scripts/peers/turns.py`, which is their side. A peer is another system's
program in an environment of its own, which `make peers` makes.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
import json
import os
from pathlib import Path
import select
import subprocess
import sys
from typing import Any
from typing import NamedTuple

from scripts.gin_source import ROOT

PEERS = 'MOONCAKE_JAX_PEERS'
START_S = 300.0
TURN_S = 300.0


class Times(NamedTuple):
  """What one turn took: seconds on the clock, and of all threads' CPUs."""

  wall_s: float
  cpu_s: float


class Turns:
  """A program that does a work whenever it is told to."""

  def __init__(self, process: subprocess.Popen[str]):
    self._process = process
    self.name = str(self._answer(START_S)['name'])

  def work(self, name: str, **arguments: Any) -> Times:
    """Does it once; raises as `ask` does."""
    answer = self.ask(name, **arguments)
    return Times(answer['wall_s'], answer['cpu_s'])

  def ask(
    self, name: str, deadline_s: float = TURN_S, **arguments: Any
  ) -> dict[str, Any]:
    """Does it once and gives all that the program says of it.

    Raises:
      RuntimeError: the program ended, or takes longer than `deadline_s`.
    """
    assert self._process.stdin
    print(
      json.dumps({'work': name} | arguments),
      file=self._process.stdin,
      flush=True,
    )
    return self._answer(deadline_s)

  def _answer(self, deadline_s: float) -> dict[str, Any]:
    assert self._process.stdout
    ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
    line = self._process.stdout.readline() if ready else ''
    if not line:
      why = 'ended' if ready else f'says nothing for {deadline_s:g} s'
      raise RuntimeError(f'{self._process.args}: {why}')
    return json.loads(line)


@contextmanager
def turns(*command: str) -> Iterator[Turns]:
  """Starts a program; ends it at the end."""
  with subprocess.Popen(
    command,
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  ) as process:
    try:
      yield Turns(process)
    finally:
      process.kill()


def ours(module: str, arguments: Mapping[str, Any]):
  """`turns` of a module of this project, in this interpreter."""
  return turns(sys.executable, '-m', module, json.dumps(arguments))


def peer(environment: str, program: str, arguments: Mapping[str, Any]):
  """`turns` of a program in scripts/peers, in its environment."""
  python = interpreter(environment)
  assert python, environment
  path = str(ROOT / 'scripts/peers' / program)
  return turns(str(python), path, json.dumps(arguments))


def interpreter(environment: str) -> Path | None:
  """Of a peer's environment; None where `make peers` did not make it.

  The environments lie in the folder that MOONCAKE_JAX_PEERS names, else in
  .venv-peers.
  """
  folder = Path(os.environ.get(PEERS, ROOT / '.venv-peers'))
  python = folder / environment / 'bin/python'
  return python if python.exists() else None
