# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: uvicorn, with deadlines for connections and two signals.

The first signal drains: no new connection or request, those under way go on.
The second stops: what is under way is cancelled, to the last page.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from types import FrameType

import h11
from starlette.applications import Starlette
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mooncake_jax.gateway.driver import Driver
from mooncake_jax.gateway.limits import GatewaySpec

MAX_HEADER_BYTES = 1 << 16


class Server(uvicorn.Server):
  """Serves a gateway's app until it is told to stop."""

  def __init__(
    self,
    app: Starlette,
    driver: Driver,
    spec: GatewaySpec,
    host: str,
    port: int,
    on_ready: Callable[[str], None] = lambda url: None,
  ):
    """`on_ready` is called with the URL; a port of 0 becomes a free one."""
    self._driver = driver
    self._on_ready = on_ready
    super().__init__(
      uvicorn.Config(
        app,
        host,
        port,
        http=_protocol(spec),
        ws='none',
        log_level='warning',
        access_log=False,
        server_header=False,
        limit_concurrency=spec.max_connections,
        timeout_keep_alive=max(1, round(spec.keep_alive_s)),
        timeout_graceful_shutdown=max(1, round(spec.drain_timeout_s)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
      )
    )

  async def startup(self, sockets=None) -> None:
    await super().startup(sockets)
    if self.started:
      name, port = self.servers[0].sockets[0].getsockname()[:2]
      self._on_ready(f'http://{f"[{name}]" if ":" in name else name}:{port}')

  async def on_tick(self, counter: int) -> bool:
    """Also ends where the loop has: a server that can't serve is no server."""
    return await super().on_tick(counter) or self._driver.error is not None

  def handle_exit(self, sig: int, frame: FrameType | None) -> None:
    """The first signal drains, the second stops, whichever they are."""
    if self.should_exit:
      self.force_exit = True
    self.should_exit = True
    self._driver.drain()

  async def shutdown(self, sockets=None) -> None:
    """Drains, then ends the loop, also after a second signal."""
    await super().shutdown(sockets)
    if self.force_exit:
      await self.lifespan.shutdown()


def _protocol(spec: GatewaySpec) -> type[H11Protocol]:
  """uvicorn's, for connections on which something must happen in time."""

  class Protocol(H11Protocol):
    """Ends connections on which nothing comes, or nothing is taken."""

    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
      super().connection_made(transport)
      # Who answers may end a connection that nobody reads.
      self.app_state = {**self.app_state, 'transport': transport}
      self._expect()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self.conn.their_state is not h11.IDLE:
        self._cancel()
      elif self._headers_due is None and data:
        self._expect()  # the first bytes of another request
      self._listen_on()

    def on_response_complete(self) -> None:
      answered = self.cycle
      super().on_response_complete()  # begins the next, if that is there
      if self.conn.their_state is not h11.IDLE:
        self._cancel()
      elif self.conn.trailing_data[0] and self._headers_due is None:
        self._expect()
      if self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
        self.loop.call_later(spec.body_timeout_s, self._end_body, answered)
      if left := self.transport.get_write_buffer_size():
        self._look_later(answered, left)

    def _listen_on(self) -> None:
      """While a request is answered and others wait: else no end is heard."""
      is_ahead = self.conn.their_state is h11.DONE
      if is_ahead and len(self.conn.trailing_data[0]) < MAX_HEADER_BYTES:
        self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
      self._cancel()
      super().connection_lost(exc)

    def _expect(self) -> None:
      self._headers_due = self.loop.call_later(
        spec.header_timeout_s, self.transport.abort
      )

    def _cancel(self) -> None:
      if self._headers_due is not None:
        self._headers_due.cancel()
        self._headers_due = None

    def _end_body(self, answered: object) -> None:
      """Of a request that was answered before it had come."""
      if self.cycle is answered and self.conn.their_state is h11.SEND_BODY:
        self.transport.abort()

    def _look_later(self, answered: object, left_bytes: int) -> None:
      again = partial(self._end_stalled, answered, left_bytes)
      self.loop.call_later(spec.write_timeout_s, again)

    def _end_stalled(self, answered: object, left_bytes: int) -> None:
      """The end of the last answer lies here, as `left_bytes` did before."""
      now_bytes = self.transport.get_write_buffer_size()
      if self.cycle is not answered or not now_bytes:
        return
      if now_bytes >= left_bytes:
        self.transport.abort()
      else:
        self._look_later(answered, now_bytes)

  return Protocol
