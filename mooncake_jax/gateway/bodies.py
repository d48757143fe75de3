# SPDX-License-Identifier: Apache-2.0
"""Reads bodies, so long and so slow as the limits let them be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import too_many
from mooncake_jax.gateway.limits import GatewaySpec


class Bodies:
  """All bodies that are read or in use; together they have a limit too."""

  def __init__(self, spec: GatewaySpec):
    self._spec = spec
    self._num_bytes = 0

  @asynccontextmanager
  async def read(self, request: Request) -> AsyncIterator[bytes]:
    """A request's whole body, which counts for as long as it is used.

    Raises:
      ApiError: 408, 413, 415 or, where others take all room, 429.
    """
    kind = request.headers.get('content-type', '').partition(';')[0]
    # A web page of elsewhere can't send this without the browser's asking.
    if kind.strip().lower() != 'application/json':
      raise ApiError(
        415, 'Content-Type must be application/json.', 'unsupported_media_type'
      )
    length = request.headers.get('content-length', '')
    if length.isdecimal() and int(length) > self._spec.max_body_bytes:
      raise self._too_long()
    parts: list[bytes] = []
    try:
      await self._read_in_time(request, parts)
      yield b''.join(parts)
    finally:
      self._num_bytes -= sum(map(len, parts))

  async def _read_in_time(self, request: Request, parts: list[bytes]) -> None:
    try:
      async with asyncio.timeout(self._spec.body_timeout_s):
        await self._read(request, parts)
    except TimeoutError:
      raise ApiError(408, 'The body took too long.', 'timeout') from None

  async def _read(self, request: Request, parts: list[bytes]) -> None:
    here = 0
    async for part in request.stream():
      here += len(part)
      if here > self._spec.max_body_bytes:
        raise self._too_long()
      if self._num_bytes + len(part) > self._spec.max_bodies_bytes:
        raise too_many('The server has too much to read.', 'server_busy', 1.0)
      self._num_bytes += len(part)
      parts.append(part)

  def _too_long(self) -> ApiError:
    most = self._spec.max_body_bytes
    return ApiError(413, f'The body has more than {most} bytes.', 'too_long')
