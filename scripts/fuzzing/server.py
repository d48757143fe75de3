# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, as whoever runs scripts/serve.py has it."""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
import os
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple
from urllib.request import urlopen

from scripts.gin_source import ROOT

START_S = 300.0
STOP_S = 60.0


class Server(NamedTuple):
  """A server that answers at `url`."""

  pid: int
  port: int

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.port}'


@contextmanager
def running(config: str, bindings: Sequence[str] = ()) -> Iterator[Server]:
  """Starts `scripts/serve.py CONFIG`; stops it as a user does, by a signal.

  Raises:
    RuntimeError: it ends by itself, or does not answer in time.
  """
  with socket.socket() as listening:
    listening.bind(('127.0.0.1', 0))
    port = listening.getsockname()[1]
  bound = [part for each in bindings for part in ('--bind', each)]
  command = [sys.executable, 'scripts/serve.py', config, *bound]
  with subprocess.Popen(
    [*command, '--port', str(port)],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
  ) as process:
    server = Server(process.pid, port)
    try:
      _await(process, server.url)
      yield server
      process.send_signal(signal.SIGTERM)
      process.wait(STOP_S)
    finally:
      process.kill()
  if process.returncode:
    raise RuntimeError(f'scripts/serve.py ended with {process.returncode}')


def _await(process: 'subprocess.Popen[bytes]', url: str) -> None:
  deadline_s = time.monotonic() + START_S
  while process.poll() is None and time.monotonic() < deadline_s:
    try:
      urlopen(f'{url}/health', timeout=1).close()
      return
    except OSError:  # refused, or accepted and not answered
      time.sleep(0.1)
  raise RuntimeError(f'scripts/serve.py does not answer at {url}')
