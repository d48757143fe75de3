# SPDX-License-Identifier: Apache-2.0
"""Chromium without a window, told what to do in WebDriver's plain JSON."""

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
import json
import shutil
import socket
import subprocess
import time
from typing import Any
from urllib.error import URLError
from urllib.request import Request
from urllib.request import urlopen

import pytest

DEADLINE_S = 30.0
KEYS = {'left': '\ue012', 'right': '\ue014', 'home': '\ue011', 'tab': '\ue004'}


class Browser:
  """One window."""

  def __init__(self, driver: str, options: dict[str, Any]):
    asked = {'capabilities': {'alwaysMatch': options}}
    made = _ask('POST', f'{driver}/session', asked)
    self._session = f'{driver}/session/{made["sessionId"]}'

  def open(self, url: str) -> None:
    """Loads a page."""
    self._post('url', {'url': url})

  def run(self, script: str, *arguments: Any) -> Any:
    """What the body of a function gives in the page."""
    return self._post('execute/sync', {'script': script, 'args': arguments})

  def wait(self, script: str) -> Any:
    """What an expression gives once it is true; fails if it never is."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := self.run(f'return {script}')):
      assert time.monotonic() < deadline_s, script
      time.sleep(0.05)
    return found

  def press(self, *keys: str) -> None:
    """Keys one after another, wherever the focus is."""
    actions = [
      {'type': f'key{way}', 'value': KEYS.get(key, key)}
      for key in keys
      for way in ('Down', 'Up')
    ]
    keyboard = {'type': 'key', 'id': 'keyboard', 'actions': actions}
    self._post('actions', {'actions': [keyboard]})

  def errors(self) -> list[str]:
    """What the console complained of since it was last asked."""
    entries = self._post('se/log', {'type': 'browser'})
    return [e['message'] for e in entries if e['level'] == 'SEVERE']

  def dark(self, on: bool) -> None:
    """Whether the user likes it dark."""
    scheme = {
      'name': 'prefers-color-scheme',
      'value': 'dark' if on else 'light',
    }
    self._post(
      'goog/cdp/execute',
      {'cmd': 'Emulation.setEmulatedMedia', 'params': {'features': [scheme]}},
    )

  def screenshot(self) -> bytes:
    """The window as PNG."""
    return b64decode(_ask('GET', f'{self._session}/screenshot'))

  def close(self) -> None:
    """Ends it."""
    _ask('DELETE', self._session)

  def _post(self, what: str, values: dict[str, Any]) -> Any:
    return _ask('POST', f'{self._session}/{what}', values)


@contextmanager
def browser(scripts: bool = True) -> Iterator[Browser]:
  """Chromium, with or without JavaScript; skips where there is none."""
  chromium, driver = shutil.which('chromium'), shutil.which('chromedriver')
  if not (chromium and driver):
    pytest.skip('no chromium and chromedriver here')
  port = _free_port()
  with subprocess.Popen(
    [driver, f'--port={port}'], stdout=subprocess.DEVNULL
  ) as process:
    try:
      _await(port)
      window = Browser(f'http://127.0.0.1:{port}', _options(chromium, scripts))
      try:
        yield window
      finally:
        window.close()
    finally:
      process.terminate()


def _options(chromium: str, scripts: bool) -> dict[str, Any]:
  arguments = [
    '--headless=new',
    '--no-sandbox',  # containers run as root
    '--disable-gpu',
    '--disable-dev-shm-usage',
    '--window-size=1280,1400',
  ]
  javascript = 1 if scripts else 2
  return {
    'goog:loggingPrefs': {'browser': 'ALL'},
    'goog:chromeOptions': {
      'binary': chromium,
      'args': arguments,
      'prefs': {
        'profile.managed_default_content_settings.javascript': javascript
      },
    },
  }


def _free_port() -> int:
  with socket.socket() as listening:
    listening.bind(('127.0.0.1', 0))
    return listening.getsockname()[1]


def _await(port: int) -> None:
  deadline_s = time.monotonic() + DEADLINE_S
  while True:
    try:
      _ask('GET', f'http://127.0.0.1:{port}/status')
      return
    except URLError:
      assert time.monotonic() < deadline_s, 'chromedriver does not answer'
      time.sleep(0.05)


def _ask(method: str, url: str, values: dict[str, Any] | None = None) -> Any:
  body = None if values is None else json.dumps(values).encode()
  headers = {'Content-Type': 'application/json'}
  request = Request(url, body, headers, method=method)
  with urlopen(request, timeout=DEADLINE_S) as answer:
    return json.load(answer)['value']
