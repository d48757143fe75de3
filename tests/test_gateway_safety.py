# SPDX-License-Identifier: Apache-2.0
"""Who may ask, how much, and what a client can't do to others."""

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

from gateway_pieces import events
from gateway_pieces import running
from lifecycle import COSTS
from lifecycle import SPEC
from mooncake_jax.changes import Change
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.tenants import from_file
from mooncake_jax.gateway.tenants import from_text
from mooncake_jax.gateway.tenants import Tenant
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.slo import SLO
from tiny_experiment import tiny

ROOT = Path(__file__).resolve().parents[1]
COMPLETIONS = '/v1/completions'
TEXT = {'model': 'tiny', 'prompt': 'a b c d e f g h i j k l m n o p q'}
ALICE, BOB, OP = (
  'alice-key-0123456789',
  'bob-key-0123456789',
  'operator-key-0123',
)
SLOW = replace(COSTS, decode_base_s=0.03)
SPECS = GatewaySpec(model_name='tiny')


def simulated(**changes):
  return tiny(**{'backend': 'virtual', 'gateway': SPECS, **changes})


def until(holds, limit_s=20.0):
  end_s = time.monotonic() + limit_s
  while not holds():
    assert time.monotonic() < end_s
    time.sleep(0.01)


@pytest.fixture(scope='module')
def keyed():
  tenants = Tenants(
    [
      (ALICE, Tenant('alice', 'a')),
      (BOB, Tenant('bob', 'b', max_open=2, tokens_per_minute=200)),
      (OP, Tenant('op', 'o', is_operator=True)),
    ]
  )
  with running(simulated(), tenants) as found:
    yield found


def cached(server, key, **changes) -> int:
  """Prompt tokens that a request did not have to compute."""
  asked = {**TEXT, 'max_tokens': 1, **changes}
  status, _, body = server.post(COMPLETIONS, asked, key)
  assert status == 200, body
  return body['usage']['prompt_tokens_details']['cached_tokens']


def test_only_keys_that_are_known_may_ask(keyed):
  for key in (None, '', 'x' * 20, ALICE[:-1], ALICE + ' ' + BOB):
    status, headers, body = keyed.post(COMPLETIONS, TEXT, key)
    assert status == 401 and headers['www-authenticate'] == 'Bearer'
    assert body['error']['code'] == 'invalid_api_key'
    assert 'alice' not in json.dumps(body)
  assert keyed.get('/v1/models', ALICE)[0] == 200
  assert keyed.get('/metrics', ALICE)[0] == 403
  assert keyed.get('/metrics', OP)[0] == 200


def test_a_page_of_elsewhere_gets_nothing_by_its_own_name(keyed):
  """DNS rebinding: the address is ours, the name in the Host header is not."""
  with running(simulated()) as server:
    for host in ('evil.example', 'evil.example:80', '127.0.0.1.evil.example'):
      status, _, body = server.post(COMPLETIONS, TEXT, host=host)
      assert (status, body['error']['code']) == (403, 'host')
    for host in ('localhost', '127.0.0.1:8000', '[::1]:80'):
      assert server.post(COMPLETIONS, TEXT, host=host)[0] == 200
  # A key is not known elsewhere.
  asked = {'model': 'tiny', 'prompt': 'x'}
  assert keyed.post(COMPLETIONS, asked, ALICE, host='gpu.example')[0] == 200


def test_tenants_and_salts_never_share_what_was_computed(keyed):
  assert cached(keyed, ALICE) == 0
  assert cached(keyed, ALICE) == 16
  assert cached(keyed, BOB) == 0
  assert cached(keyed, ALICE, cache_salt='s') == 0
  assert cached(keyed, ALICE, cache_salt='s') == 16
  assert cached(keyed, BOB, cache_salt='s') == 0
  assert cached(keyed, BOB) == 16


def test_a_decision_is_its_owners_and_the_operators(keyed):
  _, _, body = keyed.post(COMPLETIONS, {**TEXT, 'max_tokens': 1}, ALICE)
  path = f'/v1/conductor/explain/{body["id"]}'
  assert keyed.get(path, BOB)[0] == 404
  assert keyed.get(path, ALICE)[0] == keyed.get(path, OP)[0] == 200


def test_a_tenants_quota_is_its_own(keyed):
  status, _, body = keyed.post(COMPLETIONS, {**TEXT, 'n': 3}, BOB)
  assert (status, body['error']['code']) == (429, 'quota_open')
  spent = [
    keyed.post(COMPLETIONS, {**TEXT, 'max_tokens': 90}, BOB) for _ in range(3)
  ]
  status, headers, body = spent[-1]
  assert (status, body['error']['code']) == (429, 'quota_tokens')
  assert int(headers['retry-after']) >= 1
  assert keyed.post(COMPLETIONS, {**TEXT, 'max_tokens': 90}, ALICE)[0] == 200


def test_keys_come_from_a_file_or_the_environment(tmp_path):
  path = tmp_path / 'keys.json'
  path.write_text(json.dumps([{'name': 'a', 'key': ALICE, 'max_open': 3}]))
  assert from_file(path).of(f'Bearer {ALICE}').tenant.max_open == 3
  both = from_text(f'a:{ALICE},b:{BOB}')
  one, other = (both.of(f'bearer {key}').tenant for key in (ALICE, BOB))
  assert one.name == 'a' and one.salt != other.salt
  for text in (f'[{{"name": "a", "key": {json.dumps(ALICE)}, "x": 1}}]', '{'):
    path.write_text(text)
    with pytest.raises(ValueError, match='not a list of tenants') as caught:
      from_file(path)
    assert ALICE not in str(caught.value)
  for wrong in ('a', 'a:short', f'a:{ALICE},b:{ALICE}'):
    with pytest.raises(ValueError, match='key'):
      from_text(wrong)


def test_overload_is_refused_early_with_what_was_predicted():
  """Each prompt takes 0.4 s: of eight at once two or three can keep 1 s."""
  costs = replace(COSTS, prefill_base_s=0.2)
  spec = replace(SPEC, prefill_instances=1, reuse=False)
  rules = ConductorSpec(admission='early_rejection')
  overloaded = simulated(
    cluster=spec, costs=costs, conductor=rules, slo=SLO(ttft_s=1.0, tbt_s=5.0)
  )
  with running(overloaded) as server, ThreadPoolExecutor(8) as pool:

    def ask(i):
      begun_s = time.monotonic()
      status, headers, body = server.post(
        COMPLETIONS, {**TEXT, 'max_tokens': 2, 'stream': i % 2 == 0}
      )
      return status, headers, body, time.monotonic() - begun_s

    answers = [*pool.map(ask, range(8))]
    _, _, page = server.get('/metrics')
  refused = [answer for answer in answers if answer[0] == 429]
  assert 4 <= len(refused) <= 7
  assert sum(answer[0] == 200 for answer in answers) == 8 - len(refused)
  for _, headers, body, took_s in refused:
    assert body['error']['code'] == 'overloaded_ttft'
    assert body['error']['predicted_ttft_s'] > 1.0
    assert float(headers['x-predicted-ttft-s']) > 1.0
    assert int(headers['retry-after']) >= 1
    assert took_s < 1.0  # not after it has waited
  assert f'mooncake_rejections_total{{reason="ttft"}} {len(refused)}' in page


@pytest.mark.parametrize('stream', [True, False])
def test_a_late_rejection_is_a_429_too(stream):
  rules = ConductorSpec(admission='load')
  strict = simulated(conductor=rules, slo=SLO(ttft_s=30, tbt_s=1e-6))
  with running(strict) as server:
    asked = {**TEXT, 'max_tokens': 5, 'stream': stream}
    status, headers, body = server.post(COMPLETIONS, asked)
  assert status == 429 and headers['retry-after']
  assert body['error']['code'] == 'overloaded_late_tbt'


def test_more_than_the_server_bears_is_refused():
  spec = replace(SPECS, max_open_choices=3)
  with running(simulated(gateway=spec, costs=SLOW)) as server:
    status, _, body = server.post(COMPLETIONS, {**TEXT, 'n': 4})
  assert (status, body['error']['code']) == (429, 'server_busy')


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


def test_a_slow_reader_costs_nobody_and_is_cut_off():
  spec = replace(SPECS, write_timeout_s=0.5)
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


def test_headers_and_bodies_that_never_come_are_not_waited_for():
  spec = replace(SPECS, header_timeout_s=0.3, body_timeout_s=0.3)
  with running(simulated(gateway=spec)) as server:
    silent = socket.create_connection(('127.0.0.1', server.port), 10)
    half = socket.create_connection(('127.0.0.1', server.port), 10)
    half.sendall(b'POST /v1/completions HT')
    assert silent.recv(10) == half.recv(10) == b''
    body = socket.create_connection(('127.0.0.1', server.port), 10)
    body.sendall(
      b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
      b'Content-Length: 50\r\n'
      b'Content-Type: application/json\r\n\r\n{"model"'
    )
    assert body.recv(4096).startswith(b'HTTP/1.1 408')
    for client in (silent, half, body):
      client.close()
    assert server.post(COMPLETIONS, TEXT)[0] == 200


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
