# SPDX-License-Identifier: Apache-2.0
"""Whom a server without keys answers: who is on its machine and says so.

A web page of elsewhere may have its own name lead to a loopback address (DNS
rebinding), and its scripts then ask as if the server were theirs. What they
can't change is the name, which stands in the Host header.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from mooncake_jax.gateway.errors import ApiError


def check_host(request: Request) -> None:
  """Raises `ApiError` for what reaches a loopback address by another name."""
  address = (request.scope.get('server') or ('',))[0]
  if _is_loopback(address) and not _is_loopback(_name(request)):
    raise ApiError(
      403, 'Without keys this server answers to localhost only.', 'host'
    )


def _name(request: Request) -> str:
  """The host that the client means, without the port; '' for nonsense."""
  try:
    return urlsplit(f'//{request.headers.get("host", "")}').hostname or ''
  except ValueError:
    return ''


def _is_loopback(host: str) -> bool:
  if host == 'localhost':
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
