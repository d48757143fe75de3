# SPDX-License-Identifier: Apache-2.0
"""One client's request under way: as an ASGI response that serves itself.

Nothing is sent before the first token, so that a late rejection is still a
429. A client that goes away, or takes nothing for `write_timeout_s`, has its
requests cancelled. Other clients never wait for it: each has a task.
"""

import asyncio
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Message
from starlette.types import Receive
from starlette.types import Scope
from starlette.types import Send

from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.choice import Piece
from mooncake_jax.gateway.driver import Driver
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.schema import Sampled
from mooncake_jax.gateway.tenants import Quota
from mooncake_jax.gateway.writing import DONE
from mooncake_jax.gateway.writing import failure
from mooncake_jax.gateway.writing import usage
from mooncake_jax.gateway.writing import Writer


class ClientGone(Exception):
  """Nobody reads the answer."""


class Call(Response):
  """Submits a request's choices, and answers as they come."""

  def __init__(
    self,
    call_id: str,
    body: Sampled,
    choices: Sequence[Choice],
    writer: Writer,
    driver: Driver,
    quota: Quota,
    spec: GatewaySpec,
    came_s: float,
  ):
    """Opens its quota and submits; `came_s` is as of `Live.post`.

    Raises:
      ApiError: 429 or 503; then nothing was submitted.
    """
    self._id = call_id
    self._body = body
    self._choices = choices
    self._writer = writer
    self._driver = driver
    self._quota = quota
    self._write_timeout_s = spec.write_timeout_s
    # The cluster's own deadline comes first, unless its loop hangs.
    self._patience_s = driver.request_timeout_s + spec.overdue_s
    self._num_prompts = len(choices) // body.num_answers
    self._changed = asyncio.Event()
    self._is_gone = False
    driver.check(len(choices))
    self._most_tokens = sum(
      c.request.num_prompt_tokens + c.request.max_output_tokens for c in choices
    )
    quota.open(len(choices), self._most_tokens)
    for choice in choices:
      choice.owner = quota.tenant.name
      choice.on_change = self._changed.set
      driver.submit(choice, came_s)

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers; see `starlette.responses.Response`."""
    watch = asyncio.create_task(self._watch(receive))
    loop = asyncio.get_running_loop()
    overdue = loop.call_later(self._patience_s, self._give_up)
    try:
      await self._answer(send)
    except ClientGone:
      transport = scope.get('state', {}).get('transport')
      if transport is not None:
        transport.abort()  # what it does not read is not kept for it
    finally:
      overdue.cancel()
      watch.cancel()
      self._end()

  async def _answer(self, send: Send) -> None:
    try:
      if self._body.stream:
        await self._stream(send)
      else:
        await self._whole(send)
    except ApiError as error:
      await self._send_whole(send, error.status, error.body, error.headers)

  async def _stream(self, send: Send) -> None:
    """Events as tokens come.

    Raises:
      ApiError: nothing was sent yet, and there will be no answer.
    """
    while not any(choice.has_begun for choice in self._choices):
      self._raise_failure()
      await self._change()
    self._raise_failure()
    await self._send(send, self._start(200, 'text/event-stream'))
    parts = [self._writer.first(choice) for choice in self._choices]
    while True:
      parts += self._chunks()
      failed = self._failure()
      is_over = failed is not None or all(c.is_over for c in self._choices)
      if failed is not None:
        parts.append(failure(failed))
      elif is_over:
        if self._body.wants_usage:
          parts.append(self._writer.last(self._usage()))
        parts.append(DONE)
      if parts:
        await self._send(send, _body(b''.join(parts), more=not is_over))
      if is_over:
        return
      parts = []
      await self._change()

  def _chunks(self) -> list[bytes]:
    """What has come since the last time."""
    options, found = self._body.stream_options, []
    so_far = options is not None and options.continuous_usage_stats
    for choice in self._choices:
      if (piece := choice.take()) is not None:
        total = self._usage() if so_far else None
        found.append(self._writer.chunk(choice, piece, total))
        if choice.is_over and not choice.is_ended:
          self._driver.cancel(choice)  # a stop string: the engine goes on
    return found

  async def _whole(self, send: Send) -> None:
    """One body when all is there; raises as `_stream`."""
    pieces: list[list[Piece]] = [[] for _ in self._choices]
    while not all(choice.is_over for choice in self._choices):
      self._raise_failure()
      for choice, found in zip(self._choices, pieces, strict=True):
        if (piece := choice.take()) is not None:
          found.append(piece)
          if choice.is_over and not choice.is_ended:
            self._driver.cancel(choice)
      if not all(choice.is_over for choice in self._choices):
        await self._change()
    self._raise_failure()
    whole = self._writer.whole(self._choices, pieces, self._usage())
    await self._send_whole(send, 200, whole.model_dump_json().encode())

  def _usage(self):
    return usage(self._choices, self._num_prompts)

  def _failure(self) -> ApiError | None:
    return next((c.failure for c in self._choices if c.failure), None)

  def _raise_failure(self) -> None:
    if (failed := self._failure()) is not None:
      raise failed

  async def _change(self) -> None:
    """Waits until something was told, or nothing will be."""
    await self._changed.wait()
    self._changed.clear()
    if self._is_gone:
      raise ClientGone

  def _give_up(self) -> None:
    """Nothing was told for longer than the cluster lets a request live."""
    for choice in self._choices:
      self._driver.cancel(choice)
      choice.fail(ApiError(504, 'The request took too long.', 'deadline'))

  async def _watch(self, receive: Receive) -> None:
    while (await receive())['type'] != 'http.disconnect':
      pass
    self._is_gone = True
    self._changed.set()

  def _start(self, status: int, content_type: str, headers=None) -> Message:
    all_headers = {
      'content-type': content_type,
      'cache-control': 'no-store',
      'x-request-id': self._id,
      **(headers or {}),
    }
    return {
      'type': 'http.response.start',
      'status': status,
      'headers': [(k.encode(), v.encode()) for k, v in all_headers.items()],
    }

  async def _send_whole(
    self, send: Send, status: int, body: bytes, headers=None
  ) -> None:
    length = {'content-length': str(len(body)), **(headers or {})}
    await self._send(send, self._start(status, 'application/json', length))
    await self._send(send, _body(body, more=False))

  async def _send(self, send: Send, message: Message) -> None:
    """Sends, or finds that nobody reads."""
    if self._is_gone:
      raise ClientGone
    try:
      async with asyncio.timeout(self._write_timeout_s):
        await send(message)
    except (TimeoutError, OSError):
      raise ClientGone from None

  def _end(self) -> None:
    """Whatever is still under way is for nobody."""
    for choice in self._choices:
      if not choice.is_ended:
        self._driver.cancel(choice)
      choice.on_change = lambda: None
    used = sum(
      c.request.num_prompt_tokens + c.num_tokens
      for c in self._choices
      if not c.was_refused
    )
    self._quota.close(len(self._choices), self._most_tokens - used)


def _body(data: bytes, more: bool) -> Message:
  return {'type': 'http.response.body', 'body': data, 'more_body': more}
