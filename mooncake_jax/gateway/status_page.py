# SPDX-License-Identifier: Apache-2.0
"""The status page: one document that asks this server alone, and no other.

`status.html`, `.css` and `.js` become one when it is first asked for. Its
content security policy names the hashes of the only style and the only script
that may act, so that nothing that a client ever said can.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

_PARTS = ('{{style}}', '{{script}}', '{{plain}}')


def page(plain: str) -> str:
  """The document; `plain` is what it says where no script runs."""
  style, script = _read('status.css'), _read('status.js')
  document = _read('status.html')
  for part, text in zip(_PARTS, (style, script, escape(plain))):
    before, after = document.split(part)
    document = f'{before}{text}{after}'
  return document


@cache
def headers() -> dict[str, str]:
  """What the document is sent with."""
  style, script = _hash('status.css'), _hash('status.js')
  policy = (
    "default-src 'none'",
    f'style-src {style}',
    f'script-src {script}',
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
  )
  return {
    'Content-Security-Policy': '; '.join(policy),
    'Cache-Control': 'no-store',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
  }


@cache
def _read(name: str) -> str:
  return Path(__file__).with_name(name).read_text('utf-8')


def _hash(name: str) -> str:
  digest = sha256(_read(name).encode()).digest()
  return f"'sha256-{b64encode(digest).decode()}'"
