# SPDX-License-Identifier: Apache-2.0
"""How requests, connections and servers end, whoever ends them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

import pytest

from gateway_pieces import COMPLETIONS
from gateway_pieces import events
from gateway_pieces import running
from gateway_pieces import simulated
from gateway_pieces import SLOW
from gateway_pieces import TEXT
from gateway_pieces import TINY
from gateway_pieces import until
from lifecycle import SPEC
from mooncake_jax.changes import Change

ROOT = Path(__file__).resolve().parents[1]


def raw_post(server, asked, receive_bytes=None) -> socket.socket:
  """A connection that has asked and reads nothing."""
  body = json.dumps(asked).encode()
  client = socket.socket()
  if receive_bytes:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
  client.settimeout(20)
  client.connect(('127.0.0.1', server.port))
  client.sendall(
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
    b'Content-Type: application/json\r\n'
    + f'Content-Length: {len(body)}\r\n\r\n'.encode()
    + body
  )
  return client


def free_pages(server) -> set[float]:
  _, _, page = server.get('/metrics')
  lines = [line for line in page.splitlines() if 'free_pages{' in line]
  return {float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_goes_away_ends_its_request(stream):
  with running(simulated(costs=SLOW)) as server:
    driver, connection = server.made.driver, server.connection()
    asked = {**TEXT, 'max_tokens': 100, 'stream': stream, 'n': 2}
    connection.request(
      'POST',
      COMPLETIONS,
      json.dumps(asked),
      {'content-type': 'application/json'},
    )
    response = connection.getresponse() if stream else connection
    until(lambda: driver.num_open == 2)
    begun_s = time.monotonic()
    response.close()
    connection.close()
    until(lambda: driver.num_open == 0)
    assert time.monotonic() - begun_s < 1.5  # of 3 s
    _, _, page = server.get('/metrics')
    assert 'mooncake_requests_total{outcome="cancelled"} 2.0' in page
    until(lambda: free_pages(server) == {64.0, 128.0})  # all there are


def test_an_instance_that_is_lost_costs_a_client_nothing():
  """Its request is tried again elsewhere; what it has is not told again."""
  spec = replace(SPEC, decode_instances=2)
  with running(simulated(costs=SLOW, cluster=spec)) as server:
    _, _, whole = server.post(COMPLETIONS, {**TEXT, 'max_tokens': 30})
    driver = server.made.driver
    with ThreadPoolExecutor(1) as pool:
      begun = pool.submit(
        server.post, COMPLETIONS, {**TEXT, 'max_tokens': 30, 'stream': True}
      )
      until(lambda: decoding(driver))
      lost = Change(0.0, 'lose', decoding(driver)[0])
      server.command(lost.happen)
      status, _, text = begun.result(20)
    chunks = events(text)
    assert not decoding(driver)
    (seen,) = server.made.recent.of_call(chunks[0]['id'])
  assert seen.record is not None and seen.record.attempt == 1
  said = ''.join(chunk['choices'][0]['text'] for chunk in chunks)
  assert (status, said) == (200, whole['choices'][0]['text'])


def decoding(driver) -> list[str]:
  """Decode instances that step a row."""
  return [d.name for d in driver.cluster.decode.values() if d.runs]


def test_a_slow_reader_costs_nobody_and_is_cut_off():
  spec = replace(TINY, write_timeout_s=0.5)
  with running(simulated(gateway=spec, costs=SLOW)) as server:
    # Each answer begins with all of a word of 190 kB: more than kernels buffer.
    asked = {'model': 'tiny', 'prompt': 'x' * 190_000, 'echo': True}
    slow = raw_post(
      server, {**asked, 'n': 40, 'max_tokens': 100, 'stream': True}, 4096
    )
    until(lambda: server.made.driver.num_open == 40)
    for _ in range(5):
      begun_s = time.monotonic()
      assert server.post(COMPLETIONS, {**TEXT, 'max_tokens': 5})[0] == 200
      assert time.monotonic() - begun_s < 2.0
    until(lambda: server.made.driver.num_open == 0)
    _, _, page = server.get('/metrics')
    assert 'mooncake_requests_total{outcome="cancelled"} 40.0' in page
    received, limit_s = 0, time.monotonic() + 15

    def drained() -> bool:
      """Whether the server has let the connection go, before its end."""
      nonlocal received
      try:
        data = slow.recv(1 << 16)
      except ConnectionResetError:
        return True
      received += len(data)
      assert time.monotonic() < limit_s
      return not data

    while not drained():
      pass
    slow.close()
  assert received < 40 * 190_000  # it never got the whole


def is_refused(server) -> bool:
  """Whether it takes no connection, or no request on one."""
  try:
    with socket.create_connection(('127.0.0.1', server.port), 5) as client:
      client.sendall(b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
      return not client.recv(4096)
  except OSError:
    return True


def test_draining_ends_what_was_begun_and_takes_nothing_new():
  with running(simulated(costs=SLOW)) as server:
    with ThreadPoolExecutor(1) as pool:
      begun = pool.submit(
        server.post, COMPLETIONS, {**TEXT, 'max_tokens': 20, 'stream': True}
      )
      until(lambda: server.made.driver.num_open == 1)
      server.server.handle_exit(signal.SIGTERM, None)
      assert server.made.driver.is_draining
      until(lambda: is_refused(server))
      status, _, text = begun.result(20)
  said = ''.join(each['choices'][0]['text'] for each in events(text))
  assert status == 200 and len(said.split()) == 20


def test_a_second_signal_stops_at_once():
  with running(simulated(costs=SLOW)) as server:
    client = raw_post(server, {**TEXT, 'max_tokens': 100, 'stream': True})
    until(lambda: server.made.driver.num_open == 1)
    begun_s = time.monotonic()
    server.server.handle_exit(signal.SIGTERM, None)
    server.server.handle_exit(signal.SIGTERM, None)
  assert time.monotonic() - begun_s < 2.0  # of 3 s
  client.close()


class Broken:
  """A command that the loop does not survive."""

  def happen(self, cluster) -> None:
    raise RuntimeError('a secret of the loop')


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_loop_that_breaks_leaves_nobody_waiting():
  with running(simulated(costs=SLOW), ends_well=False) as server:
    driver = server.made.driver
    with ThreadPoolExecutor(2) as pool:
      begun = [
        pool.submit(
          server.post,
          COMPLETIONS,
          {**TEXT, 'max_tokens': 100, 'stream': stream},
        )
        for stream in (True, False)
      ]
      until(lambda: len(decoding(driver)) == 2)
      driver.post(Broken())
      (_, _, stream), (status, _, body) = [each.result(20) for each in begun]
    assert status == 503 and body['error']['code'] == 'stopping'
    assert events(stream)[-1]['error']['code'] == 'stopping'
    assert 'secret' not in stream + json.dumps(body)
    until(lambda: is_refused(server))  # it ends by itself
  assert isinstance(driver.error, RuntimeError)


class Stuck:
  """A command that takes its time."""

  def happen(self, cluster) -> None:
    time.sleep(2.0)


def test_a_loop_that_hangs_keeps_nobody_for_ever():
  spec = replace(TINY, overdue_s=0.2)
  cluster = replace(SPEC, request_timeout_s=0.5)
  with running(simulated(gateway=spec, cluster=cluster)) as server:
    server.made.driver.post(Stuck())
    begun_s = time.monotonic()
    status, _, body = server.post(COMPLETIONS, TEXT)
    assert time.monotonic() - begun_s < 1.8
    assert (status, body['error']['code']) == (504, 'deadline')
    until(lambda: server.made.driver.num_open == 0)
    assert server.post(COMPLETIONS, TEXT)[0] == 200


def test_the_script_serves_until_a_signal():
  """As a user runs it; what was begun before the signal is ended."""
  command = [
    sys.executable,
    'scripts/serve.py',
    'configs/serve/sim_paper.gin',
    '--port=0',
  ]
  where = {**os.environ, 'PYTHONPATH': str(ROOT)}
  process = subprocess.Popen(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=where
  )
  try:
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    host, port = url.removeprefix('http://').split(':')
    client = socket.create_connection((host, int(port)), 20)
    client.sendall(b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
    assert client.recv(4096).startswith(b'HTTP/1.1 200')
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    client.close()
  finally:
    process.kill()
    process.communicate()
