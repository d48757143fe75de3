# SPDX-License-Identifier: Apache-2.0
"""Who may ask, how much, and what a client can't do to others."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
import json
import math
import socket
import time

import pytest

from gateway_pieces import COMPLETIONS
from gateway_pieces import running
from gateway_pieces import simulated
from gateway_pieces import SLOW
from gateway_pieces import TEXT
from gateway_pieces import TINY
from lifecycle import COSTS
from lifecycle import SPEC
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.errors import rejected
from mooncake_jax.gateway.tenants import from_file
from mooncake_jax.gateway.tenants import from_text
from mooncake_jax.gateway.tenants import Tenant
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.request import Rejection
from mooncake_jax.slo import SLO

ALICE, BOB, OP = (
  'alice-key-0123456789',
  'bob-key-0123456789',
  'operator-key-0123',
)


@pytest.fixture(scope='module')
def keyed():
  tenants = Tenants(
    [
      (ALICE, Tenant('alice', 'a')),
      (BOB, Tenant('bob', 'b', max_open=2, tokens_per_minute=200)),
      (OP, Tenant('op', 'o', is_operator=True)),
    ]
  )
  rules = ConductorSpec(admission='none', keep_explanations=True)
  with running(simulated(conductor=rules), tenants) as found:
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
  (own,) = keyed.get(path, ALICE)[2]['requests']
  (whole,) = keyed.get(path, OP)[2]['requests']
  # How busy instances are tells of others' requests.
  assert own == {k: v for k, v in whole.items() if k != 'candidates'} != whole


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
  for kind in ({'is_operator': 'false'}, {'salt': 5}, {'salt': None}):
    path.write_text(json.dumps([{'name': 'a', 'key': ALICE, **kind}]))
    with pytest.raises(ValueError, match=next(iter(kind))):
      from_file(path)
  two = [
    {'name': name, 'key': key, 'salt': 's'}
    for name, key in (('a', ALICE), ('b', BOB))
  ]
  path.write_text(json.dumps(two))
  with pytest.raises(ValueError, match='the same salt'):
    from_file(path)
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


@pytest.mark.parametrize('after_s', [None, math.inf])
def test_what_never_helps_is_not_advised(after_s):
  refused = rejected(Rejection('r', 'ttft', math.inf, 0.1, after_s))
  assert 'retry-after' not in refused.headers
  assert json.loads(refused.body)['error']['predicted_ttft_s'] is None


def test_more_than_the_server_bears_is_refused():
  spec = replace(TINY, max_open_choices=3)
  with running(simulated(gateway=spec, costs=SLOW)) as server:
    status, _, body = server.post(COMPLETIONS, {**TEXT, 'n': 4})
  assert (status, body['error']['code']) == (429, 'server_busy')


def test_headers_and_bodies_that_never_come_are_not_waited_for():
  spec = replace(TINY, header_timeout_s=0.3, body_timeout_s=0.3)
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
