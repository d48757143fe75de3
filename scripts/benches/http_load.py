# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, and clients that stream from it.

The clients speak HTTP over plain sockets: what is measured is the server.
"""

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
import json
import random
import time
import urllib.request

import psutil

from scripts.fuzzing.server import running

ANSWER_TIMEOUT_S = 120.0


@dataclass
class Answer:
  """What a client got.

  Attributes:
    asked_s, ended_s: on the client's clock.
    token_s: when each event with text came.
    call_id: that the server gave.
  """

  status: int
  asked_s: float
  ended_s: float = 0.0
  token_s: list[float] = field(default_factory=list)
  call_id: str = ''

  @property
  def ttft_s(self) -> float:
    return self.token_s[0] - self.asked_s

  @property
  def took_s(self) -> float:
    return self.ended_s - self.asked_s


@dataclass
class Process:
  """A server that runs; its memory and its processor's time."""

  port: int
  process: psutil.Process

  def rss_bytes(self) -> int:
    return self.process.memory_info().rss

  def cpu_s(self) -> float:
    times = self.process.cpu_times()
    return times.user + times.system

  def get(self, path: str) -> bytes:
    url = f'http://127.0.0.1:{self.port}{path}'
    with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as answer:
      return answer.read()


@contextmanager
def server(config: str, bindings: Sequence[str]) -> Iterator[Process]:
  """As `running`, which also raises."""
  with running(config, bindings) as there:
    yield Process(there.port, psutil.Process(there.pid))


def prompt(num_words: int, rng: random.Random) -> str:
  """Words that are a token each, where a server counts words."""
  return ' '.join(f't{rng.randrange(1000, 30000)}' for _ in range(num_words))


async def ask(port: int, body: dict) -> Answer:
  """Streams one completion."""
  data = json.dumps({**body, 'stream': True}).encode()
  head = (
    'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n'
    f'Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n'
  )
  asked_s = time.perf_counter()
  reader, writer = await asyncio.open_connection('127.0.0.1', port)
  try:
    writer.write(head.encode() + data)
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
      return await _read(reader, asked_s)
  finally:
    writer.close()


async def _read(reader: asyncio.StreamReader, asked_s: float) -> Answer:
  """Lines of the head, then of events; those of chunk sizes say nothing."""
  status = int((await reader.readline()).split()[1])
  answer = Answer(status, asked_s)
  while line := await reader.readline():
    if line.startswith(b'data: {'):
      answer.token_s.append(time.perf_counter())
    elif line.startswith(b'x-request-id: '):
      answer.call_id = line.split()[1].decode()
  answer.ended_s = time.perf_counter()
  return answer


async def at_once(port: int, bodies: Sequence[dict]) -> list[Answer]:
  """All clients at the same time."""
  return [*await asyncio.gather(*(ask(port, body) for body in bodies))]


async def at_a_rate(
  port: int, bodies: Sequence[dict], per_s: float
) -> list[Answer]:
  """Clients that come whether or not others are answered, Poisson."""
  rng, tasks = random.Random(0), []
  start_s, due_s = time.perf_counter(), 0.0
  for body in bodies:
    due_s += rng.expovariate(per_s)
    await asyncio.sleep(max(0.0, start_s + due_s - time.perf_counter()))
    tasks.append(asyncio.create_task(ask(port, body)))
  return [*await asyncio.gather(*tasks)]
