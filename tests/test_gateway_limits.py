# SPDX-License-Identifier: Apache-2.0
"""What no client may take of a server: memory, threads, connections."""

import asyncio
from dataclasses import replace
import json
import socket
import time
import tracemalloc

from pydantic import ValidationError
import pytest
from starlette.requests import Request

from gateway_pieces import running
from lifecycle import COSTS
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway.asked import prepare
from mooncake_jax.gateway.asked import Served
from mooncake_jax.gateway.bodies import Bodies
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import invalid
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.schema import CompletionRequest
from mooncake_jax.gateway.tenants import Tenant
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.gateway.text_stream import TextStream
from mooncake_jax.request import Request as Asked
from mooncake_jax.request import RowTokens
from mooncake_jax.request import TokenSegment
from mooncake_jax.slo import SLO
from mooncake_jax.workload.words import WordCodec
from tiny_experiment import tiny

SPECS = GatewaySpec(model_name='tiny')


@pytest.mark.parametrize('wrong', ['{}', '[[]]', 'true', '-1'])
def test_a_million_mistakes_cost_no_more_than_one(wrong):
  """pydantic would keep a kilobyte of each: a MiB of '{}' took 1.2 GB."""
  items = '[' + ','.join([wrong] * 1000) + ']'
  texts = (
    '{"model": "x", "prompt": %s}',
    '{"model": "x", "prompt": "a", "stop": %s}',
    '{"model": "x", "prompt": "a", "stop_token_ids": %s}',
  )
  for text in texts:
    with pytest.raises(ValidationError) as found:
      CompletionRequest.model_validate_json(text % items)
    assert found.value.error_count() < 20


@pytest.mark.parametrize('count', [1, 256, 257, 20_000])
def test_unknown_fields_are_not_all_worded_to_tell_of_one(count):
  """Each is kept and worded: a MiB of them held the GIL for half a second."""
  unknown = {f'k{i}': 0 for i in range(count)}
  text = json.dumps({'model': 'x', 'prompt': 'a'} | unknown)
  with pytest.raises(ValidationError) as found:
    CompletionRequest.model_validate_json(text)
  tracemalloc.start()
  refusal = invalid(found.value)
  _, peak_bytes = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert refusal.status == 400
  assert peak_bytes < 1 << 19
  if count <= 256:
    assert refusal.detail.param == 'k0'
  else:
    assert str(count) in refusal.detail.message


def test_too_many_prompts_are_refused_before_they_become_tokens():
  class Unused(WordCodec):
    def encode(self, text: str) -> list[int]:
      raise AssertionError('a prompt became tokens')

  served = Served('tiny', Unused(10), 10, 10, 4, '0', (), (1,), 0)
  asked = CompletionRequest(model='tiny', prompt=['a'] * 65)
  with pytest.raises(ApiError, match='more than 64 answers'):
    prepare(asked, 'id', served, SPECS, '')


def test_bodies_count_for_as_long_as_they_are_used():
  def request(body: bytes) -> Request:
    async def receive():
      return {'type': 'http.request', 'body': body}

    headers = [(b'content-type', b'application/json')]
    return Request({'type': 'http', 'headers': headers}, receive)

  async def ask():
    bodies = Bodies(replace(SPECS, max_bodies_bytes=100))
    async with bodies.read(request(b'x' * 60)) as one:
      assert len(one) == 60
      with pytest.raises(ApiError, match='too much to read'):
        async with bodies.read(request(b'x' * 60)):
          pass
    async with bodies.read(request(b'x' * 60)) as one:
      assert len(one) == 60

  asyncio.run(ask())


def ended(client: socket.socket, limit_s: float = 5.0) -> float:
  """Seconds until the other end has hung up, whatever it says before."""
  begun_s = time.monotonic()
  client.settimeout(limit_s)
  try:
    while client.recv(1 << 16):
      assert time.monotonic() - begun_s < limit_s
  except ConnectionResetError:
    pass
  return time.monotonic() - begun_s


@pytest.mark.parametrize('later', [b'', b'x'])
def test_a_body_that_nobody_reads_must_come_too(later):
  """An answer may be ready before its body: what is left has a deadline."""
  spec = replace(SPECS, body_timeout_s=0.3, header_timeout_s=0.3)
  with running(tiny(backend='virtual', gateway=spec)) as server:
    for head in (b'GET /health', b'POST /v1/nowhere'):
      client = socket.create_connection(('127.0.0.1', server.port), 10)
      client.sendall(
        head + b' HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n'
      )
      assert client.recv(4096).startswith(b'HTTP/1.1 ')
      client.sendall(later)
      assert ended(client) < 3
      client.close()


def test_requests_that_come_ahead_are_all_answered():
  """The deadline of headers is not that of a request that is complete."""
  spec = replace(SPECS, header_timeout_s=0.3)
  with running(tiny(backend='virtual', gateway=spec)) as server:
    client = socket.create_connection(('127.0.0.1', server.port), 10)
    one = b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n'
    client.sendall(one * 4)
    got = b''
    while got.count(b'HTTP/1.1 200') < 4:
      got += client.recv(1 << 16)
    time.sleep(0.6)
    client.sendall(one)
    assert client.recv(4096).startswith(b'HTTP/1.1 200')
    client.close()


def test_an_answer_that_nobody_takes_is_not_kept_for_ever():
  spec = replace(SPECS, write_timeout_s=0.3, keep_alive_s=1)
  with running(tiny(backend='virtual', gateway=spec)) as server:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(('127.0.0.1', server.port))
    asked = b'{"model": "tiny", "prompt": "%s", "echo": true, "n": 40}'
    body = asked % (b'x' * 190_000)
    client.sendall(
      b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
      b'Connection: close\r\n'
      b'Content-Type: application/json\r\n'
      b'Content-Length: %d\r\n\r\n' % len(body) + body
    )
    state = server.server.server_state
    assert client.recv(16).startswith(b'HTTP/1.1 200')
    end_s = time.monotonic() + 5
    while state.connections and time.monotonic() < end_s:
      time.sleep(0.05)
    assert not state.connections
    client.close()


def test_tokens_after_an_answers_end_are_not_counted():
  """The engine goes on until it hears of the end; others are answered yet."""
  request = Asked('r', 0.0, 4, 9, (), None)
  text = TextStream(WordCodec(20).decode)
  choice = Choice(0, request, text, frozenset([9]), min_tokens=1)

  def emit(*tokens: int) -> None:
    segment = TokenSegment(0.0, 0.0, len(tokens))
    choice.hear(RowTokens('r', 0, segment, tokens, ()))

  emit(5, 9, 7)
  piece = choice.take()
  assert piece and (piece.tokens, piece.finish_reason) == ([5], 'stop')
  emit(6, 8)
  assert choice.num_tokens == 2 and choice.take() is None


def test_what_was_refused_costs_a_tenant_nothing():
  key = 'k' * 16
  tenants = Tenants([(key, Tenant('one', 'one', tokens_per_minute=40))])
  never = tiny(
    backend='virtual',
    gateway=SPECS,
    conductor=ConductorSpec(admission='early_rejection'),
    slo=SLO(ttft_s=1e-9, tbt_s=5.0),
  )
  with running(never, tenants) as server:
    asked = {'model': 'tiny', 'prompt': 'a b c d e f g h', 'max_tokens': 2}
    for _ in range(10):
      status, _, body = server.post('/v1/completions', asked, key)
      assert (status, body['error']['code']) == (429, 'overloaded_ttft')


def test_a_client_that_asks_ahead_and_goes_away_ends_its_request():
  slow = replace(COSTS, decode_base_s=0.03)
  with running(tiny(backend='virtual', gateway=SPECS, costs=slow)) as server:
    client = socket.create_connection(('127.0.0.1', server.port), 10)
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 100}'
    head = (
      b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
      b'Content-Type: application/json\r\nContent-Length: %d\r\n\r\n'
    )
    client.sendall(head % len(body) + body)
    end_s = time.monotonic() + 5
    while not server.made.driver.num_open:
      assert time.monotonic() < end_s
    client.sendall(head % len(body) + body)
    time.sleep(0.2)
    gone_s = time.monotonic()
    client.close()
    while server.made.driver.num_open:
      time.sleep(0.01)
    assert time.monotonic() - gone_s < 1.5  # of 3 s
