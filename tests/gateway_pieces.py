# SPDX-License-Identifier: Apache-2.0
"""A live server in a thread of the test's process, and raw requests to it."""

import asyncio
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
import http.client
import json
import threading
import time
from typing import Any

from lifecycle import COSTS
from mooncake_jax.cluster import Cluster
from mooncake_jax.gateway.app import Gateway
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.server import Server
from mooncake_jax.gateway.tenants import Tenants
from scripts.experiment import Experiment
from scripts.service import gateway
from tiny_experiment import tiny

LIMIT_S = 60.0
COMPLETIONS, CHATS = '/v1/completions', '/v1/chat/completions'
# 17 tokens: two blocks, and one that is always computed.
TEXT = {'model': 'tiny', 'prompt': 'a b c d e f g h i j k l m n o p q'}
SLOW = replace(COSTS, decode_base_s=0.03)  # of a decode step
TINY = GatewaySpec(model_name='tiny')


@dataclass
class Running:
  """A server that answers at `url`."""

  url: str
  made: Gateway
  server: Server

  @property
  def port(self) -> int:
    return int(self.url.rsplit(':', 1)[1])

  def connection(self) -> http.client.HTTPConnection:
    return http.client.HTTPConnection('127.0.0.1', self.port, timeout=LIMIT_S)

  def post(
    self, path: str, body: Any, key: str | None = None, **headers: str
  ) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case, and the JSON or text that came."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {'content-type': 'application/json', **headers}
    if key is not None:
      sent['authorization'] = f'Bearer {key}'
    return self._ask('POST', path, data, sent)

  def get(
    self, path: str, key: str | None = None
  ) -> tuple[int, dict[str, str], Any]:
    sent = {} if key is None else {'authorization': f'Bearer {key}'}
    return self._ask('GET', path, None, sent)

  def command(self, happen: Callable[[Cluster], Any]) -> Any:
    """Something done in the loop's thread, as a question is asked."""
    asked = self.made.driver.ask(happen)
    events = self.made.driver.events
    return asyncio.run_coroutine_threadsafe(asked, events).result(LIMIT_S)

  def _ask(self, method, path, data, headers):
    connection = self.connection()
    try:
      connection.request(method, path, data, headers)
      response = connection.getresponse()
      text = response.read()
      found = {k.lower(): v for k, v in response.getheaders()}
      is_json = found.get('content-type', '').startswith('application/json')
      return (
        response.status,
        found,
        json.loads(text) if is_json else text.decode(),
      )
    finally:
      connection.close()


@contextmanager
def running(
  experiment: Experiment,
  tenants: Tenants | None = None,
  ends_well: bool = True,
) -> Iterator[Running]:
  """Serves until the end of the block; then all must have ended well."""
  ready, found = threading.Event(), []

  def serve() -> None:
    with gateway(experiment, tenants or Tenants()) as made:

      def say(url: str) -> None:
        found.append(Running(url, made, server))
        ready.set()

      server = Server(made.app(), made.driver, made.spec, '127.0.0.1', 0, say)
      server.run()

  thread = threading.Thread(target=serve)
  thread.start()
  assert ready.wait(LIMIT_S) or not thread.is_alive(), 'it never began'
  try:
    yield found[0]
  finally:
    if found:
      found[0].server.should_exit = True
    thread.join(LIMIT_S)
    assert not thread.is_alive(), 'it never ended'
    if found and ends_well:
      made = found[0].made
      assert made.driver.error is None, made.driver.error
      assert made.driver.cluster.idle and not made.driver.cluster.leaks()


def events(text: str) -> list[dict[str, Any]]:
  """The JSON of server-sent events, which end with [DONE]."""
  lines = [line for line in text.split('\n\n') if line]
  assert lines[-1] == 'data: [DONE]', lines[-1:]
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def simulated(**changes) -> Experiment:
  """`tiny`, simulated at the pace of the clock."""
  return tiny(**{'backend': 'virtual', 'gateway': TINY, **changes})


def until(holds: Callable[[], Any], limit_s: float = 20.0) -> None:
  """Waits until it does."""
  end_s = time.monotonic() + limit_s
  while not holds():
    assert time.monotonic() < end_s
    time.sleep(0.01)
