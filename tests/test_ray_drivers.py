# SPDX-License-Identifier: Apache-2.0
"""A driver is killed, and the next one takes its instances over."""

import importlib.util
import json
import os
from pathlib import Path
import secrets
import socket
import subprocess
import sys
import threading

import pytest

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
HERE = Path(__file__).parent
LIMIT_S = 180.0


@pytest.fixture
def ray_address(monkeypatch):
  """A Ray cluster that no driver started."""
  monkeypatch.setenv('RAY_AUTH_MODE', 'token')
  monkeypatch.setenv('RAY_AUTH_TOKEN', secrets.token_hex(32))
  monkeypatch.setenv('RAY_USAGE_STATS_ENABLED', '0')
  monkeypatch.setenv('RAY_worker_niceness', '0')
  paths = os.pathsep.join([str(HERE.parent), str(HERE)])
  monkeypatch.setenv('PYTHONPATH', paths)
  with socket.create_server(('127.0.0.1', 0)) as probe:
    port = probe.getsockname()[1]
  command = (
    f'{sys.executable} -m ray.scripts.scripts start --head --block '
    f'--node-ip-address 127.0.0.1 --port {port} --num-cpus 4 '
    '--include-dashboard false --object-store-memory 134217728'
  )
  monkeypatch.setenv('PYTHONUNBUFFERED', '1')  # it says when it has started
  head = started(command.split())
  try:
    yield f'127.0.0.1:{port}'
  finally:
    head.terminate()
    head.communicate(timeout=LIMIT_S)


def started(command: list[str]) -> subprocess.Popen:
  """Ray's head; another one where its parts did not wait for each other.

  On a busy machine an agent may need longer to start than the 15 s after which
  the raylet ends, and with it the head.
  """
  for _ in range(3):
    head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if line_of(head, 'Ray runtime started'):
      return head
    head.communicate(timeout=LIMIT_S)
  raise AssertionError('Ray did not start')


def start(address: str, which: str) -> subprocess.Popen:
  command = [sys.executable, HERE / 'ray_driver.py', address, which]
  return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen, wanted: str) -> str:
  """The next line with some words, '' if it ends; waits `LIMIT_S` at most."""
  assert process.stdout is not None
  limit = threading.Timer(LIMIT_S, process.kill)
  limit.start()
  try:
    return next((line for line in process.stdout if wanted in line), '')
  finally:
    limit.cancel()


def told(driver: subprocess.Popen, event: str) -> dict:
  """The next of its lines that is of this event."""
  line = line_of(driver, f'"event": "{event}"')
  assert line, f'the driver ended without {event!r}'
  return json.loads(line)


def test_the_next_driver_serves_from_what_the_killed_one_left(ray_address):
  with start(ray_address, 'first') as first:
    try:
      began, served = told(first, 'began'), told(first, 'served')
      told(first, 'hangs')
    finally:
      first.kill()
  with start(ray_address, 'second') as second:
    again, hits = told(second, 'began'), told(second, 'served')
  assert second.returncode == 0
  assert again['processes'] == began['processes']
  assert not any(again['works'].values()), again
  assert not any(again['buffers'].values()), again
  assert served['blocks'] == 0 and hits['blocks'] >= 8
  assert not served['left'] and not hits['left'], hits
  assert all(reused.get('local_host') for reused in hits['reused']), hits
  # What was reused is what would be computed.
  assert hits['tokens'] == served['tokens']
