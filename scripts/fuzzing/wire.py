# SPDX-License-Identifier: Apache-2.0
"""Hostile clients on raw sockets: what they send, and how they leave.

Everything is drawn from a seed, so that a case can be sent again.
"""

import json
import random
import socket
import struct
from typing import Literal
from typing import NamedTuple

from scripts.fuzzing.bodies import CHAT
from scripts.fuzzing.bodies import good
from scripts.fuzzing.bodies import nearly
from scripts.fuzzing.bodies import TEXT

# Reads to the end · shuts its sending side first · goes · goes with a reset ·
# reads a little, then goes with a reset.
Ending = Literal['read', 'half', 'close', 'reset', 'peek']
TIMEOUT_S = 20.0
MOST_BYTES = 1 << 20


class Case(NamedTuple):
  """What one client does."""

  name: str
  parts: tuple[bytes, ...]
  ending: Ending = 'read'


def case(seed: int, model: str) -> Case:
  """One of all kinds of hostile clients."""
  rng = random.Random(seed)
  kind = rng.choices([*_KINDS], [*_KINDS.values()])[0]
  path = rng.choice((CHAT, TEXT))
  return kind(rng, model, path)


def _headers(
  path: str, length: int | None, *more: bytes, method: str = 'POST'
) -> bytes:
  lines = [
    f'{method} {path} HTTP/1.1'.encode(),
    b'Host: localhost',
    b'Connection: close',
    b'Content-Type: application/json',
  ]
  if length is not None:
    lines.append(b'Content-Length: %d' % length)
  return b'\r\n'.join((*lines, *more, b'', b''))


def _bad_body(rng: random.Random, model: str, path: str) -> Case:
  body = nearly(rng, model, path)
  return Case('bad body', (_headers(path, len(body)), body))


def _truncated(rng: random.Random, model: str, path: str) -> Case:
  body = json.dumps(good(model, path)).encode()
  sent = body[: rng.randrange(len(body))]
  ending = rng.choice(('half', 'close', 'reset'))
  return Case('truncated', (_headers(path, len(body)), sent), ending)


def _leaves(rng: random.Random, model: str, path: str) -> Case:
  """A good request whose client goes at some point of its answer."""
  wanted = good(model, path, stream=rng.random() < 0.6)
  wanted |= {'max_tokens': rng.choice((1, 8, 200)), 'ignore_eos': True}
  wanted |= {'n': rng.choice((1, 1, 3))}
  body = json.dumps(wanted).encode()
  ending = rng.choice(('half', 'close', 'reset', 'peek'))
  return Case('leaves', (_headers(path, len(body)), body), ending)


def _header(rng: random.Random, model: str, path: str) -> Case:
  body = json.dumps(good(model, path)).encode()
  odd = rng.choice(
    (
      b'X-Long: ' + b'a' * 200_000,
      b'\r\n'.join(b'X-%d: y' % i for i in range(5000)),
      b'Authorization: Bearer \xff\xfe\x80',
      b'Authorization: ' + b'Bearer ' * 500,
      b'Authorization: Basic Og==',
      b'No colon here',
      b': no name',
      b'X-Null: a\x00b',
      b'X-Fold: a\r\n b',
      b'Content-Encoding: gzip',
      b'Content-Type: text/plain',
      b'Content-Type: application/json; charset=utf-16',
      b'Expect: 100-continue',
      b'Upgrade: websocket\r\nConnection: Upgrade',
      b'Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA',
      b'Host: another',
    )
  )
  return Case('header', (_headers(path, len(body), odd), body))


def _framing(rng: random.Random, model: str, path: str) -> Case:
  """Bodies whose length nobody can be sure of."""
  body = json.dumps(good(model, path)).encode()
  chunked = b'Transfer-Encoding: chunked'
  chunk = b'%x\r\n%b\r\n' % (len(body), body)
  odd = rng.choice(
    (
      (_headers(path, None, b'Content-Length: -1'), body),
      (_headers(path, None, b'Content-Length: 1e3'), body),
      (_headers(path, len(body), b'Content-Length: 3'), body),
      (_headers(path, None, b'Content-Length: ' + b'9' * 40), body),
      (_headers(path, 1 << 40), body),
      (_headers(path, 1 << 24), b'"' * (1 << 16)),
      (_headers(path, len(body), chunked), chunk, b'0\r\n\r\n'),
      (_headers(path, None, chunked), chunk, b'0\r\n\r\n'),
      (_headers(path, None, chunked), chunk),
      (_headers(path, None, chunked), b'zz\r\n', body),
      (_headers(path, None, chunked), b'ffffffffffffffff\r\n', body),
      (_headers(path, None, b'Transfer-Encoding: gzip'), body),
      (_headers(path, None), body),
      (_headers(path, 0), body),
    )
  )
  return Case('framing', odd, rng.choice(('half', 'half', 'close', 'reset')))


def _request_line(rng: random.Random, model: str, path: str) -> Case:
  del model, path
  odd = rng.choice(
    (
      b'',
      b'\r\n' * 2000,
      b'GET\r\n\r\n',
      b'GET / HTTP/9.9\r\n\r\n',
      b'GET  /  HTTP/1.1\r\n\r\n',
      b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
      b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + rng.randbytes(300),
      b'GET /' + b'a' * 100_000 + b' HTTP/1.1\r\n\r\n',
      b'GET /%ff%00%2e%2e%2f HTTP/1.1\r\nHost: x\r\n\r\n',
      b'GET //..//..//etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n',
      b'GET http://other/v1/models HTTP/1.1\r\nHost: x\r\n\r\n',
      b'CONNECT other:80 HTTP/1.1\r\nHost: x\r\n\r\n',
      b'OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n',
      b'GET /v1/models HTTP/1.1\r\n\r\n',
      b'GET /v1/models HTTP/1.0\r\n\r\n',
      rng.randbytes(rng.randrange(1, 4000)),
    )
  )
  return Case('request line', (odd,), rng.choice(('half', 'close', 'reset')))


def _elsewhere(rng: random.Random, model: str, path: str) -> Case:
  """Other paths and methods."""
  body = json.dumps(good(model, path)).encode()
  where = rng.choice(
    (
      path,
      '/',
      '/status.json',
      '/metrics',
      '/health',
      '/v1/models',
      '/v1/models/' + 'x' * 3000,
      '/v1/models/%00',
      '/v1/conductor/explain/nobody',
      '/v1/conductor/explain/%F0%9F%98%80',
      '/v1/conductor/explain/..%2f..',
      '/v1/embeddings',
      '/openapi.json?x=' + '%' * 50,
      '/v1/completions/',
    )
  )
  method = rng.choice(
    (
      'GET',
      'POST',
      'PUT',
      'DELETE',
      'HEAD',
      'OPTIONS',
      'PATCH',
      'TRACE',
      'BREW',
    )
  )
  head = _headers(where, len(body), method=method)
  return Case(f'{method} elsewhere', (head, body))


def _piped(rng: random.Random, model: str, path: str) -> Case:
  """Several requests at once, the answers of which nobody waits for."""
  body = json.dumps(good(model, path)).encode()
  head = _headers(path, len(body)).replace(b'Connection: close\r\n', b'')
  ending = rng.choice(('half', 'close', 'reset', 'peek'))
  return Case('piped', (head + body,) * rng.randrange(2, 6), ending)


_KINDS = {
  _bad_body: 9,
  _truncated: 3,
  _leaves: 3,
  _header: 2,
  _framing: 2,
  _request_line: 2,
  _elsewhere: 2,
  _piped: 1,
}


class Answers(NamedTuple):
  """What came back: status codes in order, and the bytes."""

  codes: tuple[int, ...]
  raw: bytes


def send(port: int, sent: Case, host: str = '127.0.0.1') -> Answers:
  """Does as the case says.

  Raises:
    TimeoutError: the server neither answers nor hangs up.
  """
  with socket.create_connection((host, port), TIMEOUT_S) as connection:
    raw = bytearray()
    try:
      for part in sent.parts:
        connection.sendall(part)
      if sent.ending == 'half':
        connection.shutdown(socket.SHUT_WR)
      if sent.ending == 'peek':
        raw += connection.recv(64)
      elif sent.ending in ('read', 'half'):
        _read(connection, raw)
    except TimeoutError:
      raise
    except OSError:
      pass  # It need not listen to the end.
    if sent.ending in ('reset', 'peek'):
      linger = struct.pack('ii', 1, 0)
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
  return Answers(_codes(bytes(raw)), bytes(raw))


def _read(connection: socket.socket, raw: bytearray) -> None:
  """All there is to the end, as far as it is not too much."""
  while len(raw) < MOST_BYTES and (part := connection.recv(1 << 16)):
    raw += part


def _codes(raw: bytes) -> tuple[int, ...]:
  """Of all answers in there: heads begin on lines of their own."""
  found = []
  for line in raw.split(b'\r\n'):
    # The head of a piped answer comes right behind the body before it.
    _, version, rest = line.rpartition(b'HTTP/1.1 ')
    if version and rest[:3].isdigit():
      found.append(int(rest[:3]))
  return tuple(found)
