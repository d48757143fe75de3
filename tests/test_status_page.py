# SPDX-License-Identifier: Apache-2.0
"""The status page in a browser: what it shows, to whom, and what it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer
import json
import re
import threading
from typing import Any

import pytest

from browser import Browser
from browser import browser
from gateway_pieces import Running
from gateway_pieces import running
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.gateway import status_page
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.slo import SLO
from tiny_experiment import tiny

HOSTILE = '<img src=x onerror="document.title=1">{{script}}</script>'
NAMELESS = """
  const named = e => e.getAttribute('aria-label') || e.labels?.length
    || e.textContent.trim();
  return [...document.querySelectorAll(
    'a, button, select, input, [role=meter], [role=option], [role=img]'
  )].filter(e => e.checkVisibility() && !named(e)).map(e => e.outerHTML)"""


@dataclass
class Server:
  """Serves the page, and as its status whatever it is told to."""

  url: str
  answer: dict[str, Any]
  code: int = 200
  keys: list[str | None] = field(default_factory=list)


@contextmanager
def server(answer: dict[str, Any], plain: str = '') -> Iterator[Server]:
  class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
      if self.path == '/':
        return self.reply(200, status_page.page(plain), status_page.headers())
      if self.path != '/status.json':
        return self.reply(404, '', {})
      told.keys.append(self.headers['Authorization'])
      self.reply(told.code, json.dumps(told.answer), {})

    def reply(self, code: int, body: str, headers: dict[str, str]) -> None:
      self.send_response(code)
      kind = 'text/html' if self.path == '/' else 'application/json'
      for name, value in {'Content-Type': kind, **headers}.items():
        self.send_header(name, value)
      self.end_headers()
      self.wfile.write(body.encode())

    def log_message(self, format, *args):
      pass

  with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as http:
    told = Server(f'http://127.0.0.1:{http.server_port}', answer)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
      yield told
    finally:
      http.shutdown()
      thread.join()


@pytest.fixture(scope='module')
def window() -> Iterator[Browser]:
  with browser() as opened:
    yield opened


@pytest.fixture(scope='module')
def served() -> Iterator[Running]:
  """A server that has answered and refused, under a hostile title."""
  rules, spec = ConductorSpec(), GatewaySpec(model_name='tiny')
  slo = SLO(ttft_s=5e-3)
  with running(
    tiny(
      title=HOSTILE, backend='virtual', conductor=rules, slo=slo, gateway=spec
    )
  ) as server:
    for prompt in ('a ' * 8, 'a ' * 20, 'b ' * 90, 'a ' * 20):
      body = {'model': 'tiny', 'prompt': prompt, 'max_tokens': 4}
      server.post('/v1/completions', body)
    yield server


def test_the_page_shows_the_status_and_goes_by_the_keyboard(
  window, served, tmp_path
):
  told = served.get('/status.json')[2]
  assert {r['outcome'] for r in told['requests']} == {'completed', 'rejected'}
  window.open(served.url)
  window.wait('document.getElementById("since").textContent === "live"')
  assert HOSTILE in window.run('return document.body.innerText')
  assert HOSTILE in window.run('return document.title')
  bars = '#lanes [role=option]'
  count = 'return document.querySelectorAll(arguments[0]).length'
  assert window.run(count, bars) == len(told['requests'])
  assert window.run(count, 'main .instances li') == sum(
    len(part)
    for part in (
      told['fleet']['prefill']['busiest'],
      told['fleet']['decode']['busiest'],
      told['fleet']['store'],
    )
  )
  assert window.run(NAMELESS) == []

  window.run('document.getElementById("lanes").focus()')
  window.press('home')
  first = told['requests'][0]['id']
  assert window.run('return document.activeElement.id') == 'lanes'
  window.wait(
    f'document.getElementById("told").innerText.startsWith({first!r})'
  )
  window.press('right', 'p')
  assert window.wait('document.getElementById("since").textContent') == 'paused'

  for scheme, dark in (('light', False), ('dark', True)):
    window.dark(dark)
    picture = window.screenshot()
    (tmp_path / f'{scheme}.png').write_bytes(picture)
    assert len(picture) > 20_000
  assert window.errors() == []


def test_whoever_has_no_key_is_asked_for_one(window, served):
  with server({'error': {}}) as here:
    here.code = 401
    window.open(here.url)
    window.wait('!document.getElementById("locked").hidden')
    here.code, here.answer = 200, served.get('/status.json')[2]
    window.run('document.getElementById("key").focus()')
    window.press(*'abc', '\ue007')
    window.wait('document.getElementById("since").textContent === "live"')
    assert here.keys[0] is None and here.keys[-1] == 'Bearer abc'
    assert window.run('return document.getElementById("locked").hidden')


def test_a_server_that_is_gone_is_told_and_found_again(window, served):
  with server(served.get('/status.json')[2]) as here:
    here.code = 503
    window.open(here.url)
    window.wait('document.getElementById("dot").className === "lost"')
    here.code = 200
    window.wait('document.getElementById("dot").className === "live"')


def test_without_scripts_the_page_is_text():
  with server({}, 'offered  7 <b>') as here, browser(scripts=False) as window:
    window.open(here.url)
    assert 'offered  7 <b>' in window.run('return document.body.innerText')


def test_the_policy_lets_nothing_act_but_the_pages_own_parts():
  policy = status_page.headers()['Content-Security-Policy']
  assert "default-src 'none'" in policy and 'unsafe' not in policy
  document = status_page.page('')
  assert not re.search(r'\s(on\w+|style)=', document.split('<script>')[0])
  assert 'http' not in document.replace(
    'http://www.w3.org/2000/svg', ''
  ).replace('http-equiv', '')
  assert document.count('<script>') == document.count('</script>') == 1
  assert '<img' not in status_page.page(HOSTILE)


@pytest.mark.parametrize('name', ['status.html', 'status.css', 'status.js'])
def test_every_part_goes_with_the_package(name, root):
  listed = (root / 'pyproject.toml').read_text()
  assert f'*.{name.rpartition(".")[2]}' in listed
  assert (
    len((root / 'mooncake_jax/gateway' / name).read_text().split('\n')) < 400
  )
