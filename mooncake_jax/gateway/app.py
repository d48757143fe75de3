# SPDX-License-Identifier: Apache-2.0
"""The endpoints, as a Starlette application."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
import time
from typing import TypeVar
import uuid

from pydantic import BaseModel
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.responses import JSONResponse
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route

from mooncake_jax import __version__
from mooncake_jax.gateway import openapi
from mooncake_jax.gateway import status_page
from mooncake_jax.gateway.answers import Answer
from mooncake_jax.gateway.answers import Health
from mooncake_jax.gateway.answers import ModelCard
from mooncake_jax.gateway.answers import ModelList
from mooncake_jax.gateway.asked import no_such_model
from mooncake_jax.gateway.asked import prepare
from mooncake_jax.gateway.asked import prompt_texts
from mooncake_jax.gateway.asked import Served
from mooncake_jax.gateway.board import Board
from mooncake_jax.gateway.bodies import Bodies
from mooncake_jax.gateway.call import Call
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.driver import Driver
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import invalid
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.measures import Measures
from mooncake_jax.gateway.origin import check_host
from mooncake_jax.gateway.schema import ChatRequest
from mooncake_jax.gateway.schema import CompletionRequest
from mooncake_jax.gateway.tenants import Quota
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.gateway.watching import explained
from mooncake_jax.gateway.watching import Recent
from mooncake_jax.gateway.watching import snapshot
from mooncake_jax.gateway.writing import ChatWriter
from mooncake_jax.gateway.writing import TextWriter
from mooncake_jax.gateway.writing import Writer

# Longer bodies are read and tokenized on a thread, so that streams go on.
INLINE_BYTES = 1 << 14
STOP_TIMEOUT_S = 30.0

Body = TypeVar('Body', CompletionRequest, ChatRequest)


class Gateway:
  """Endpoints over one driver."""

  def __init__(
    self,
    served: Served,
    driver: Driver,
    tenants: Tenants,
    spec: GatewaySpec,
    measures: Measures,
    recent: Recent,
    board: Board,
  ):
    """`measures` and `recent` are among the driver's watchers."""
    self.served = served
    self.driver = driver
    self.tenants = tenants
    self.spec = spec
    self.measures = measures
    self.recent = recent
    self.board = board
    self._bodies = Bodies(spec)
    self._threads = ThreadPoolExecutor(2, 'prepare')
    self._document = openapi.document(__version__, served.name)

  def app(self) -> Starlette:
    return Starlette(
      routes=self.routes(),
      lifespan=self._lifespan,
      exception_handlers={
        ApiError: _refuse,
        HTTPException: _refuse_http,
        ClientDisconnect: _nobody,
        Exception: _broken,
      },
    )

  def routes(self) -> list[BaseRoute]:
    return [
      Route('/', self.page),
      Route('/status.json', self.status),
      Route('/health', self.health),
      Route('/metrics', self.metrics),
      Route('/openapi.json', self.openapi),
      Route('/v1/models', self.models),
      Route('/v1/models/{id:path}', self.model),
      Route('/v1/completions', self.completions, methods=['POST']),
      Route('/v1/chat/completions', self.chat, methods=['POST']),
      Route('/v1/conductor/explain/{id}', self.explain),
    ]

  async def page(self, request: Request) -> Response:
    """Says nothing by itself where keys are needed: it asks for one."""
    plain = 'This server wants a key, which only a script can send.'
    if not self.tenants.has_keys:
      plain = await self.board.text(self._quota(request))
    return HTMLResponse(status_page.page(plain), headers=status_page.headers())

  async def status(self, request: Request) -> Response:
    told = await self.board.document(self._quota(request))
    headers = {'cache-control': 'no-store'}
    return Response(told, 200, headers, media_type='application/json')

  async def health(self, request: Request) -> Response:
    """200 while requests are taken."""
    driver = self.driver
    status = 'draining' if driver.is_draining else 'ok'
    status = 'failed' if driver.error is not None else status
    return _json(Health(status=status), 200 if status == 'ok' else 503)

  async def metrics(self, request: Request) -> Response:
    self._operator(request)
    now = await self.driver.ask(snapshot)
    page = self.measures.page(now, self.driver.num_open)
    return Response(page, media_type='text/plain; version=0.0.4')

  async def openapi(self, request: Request) -> Response:
    return JSONResponse(self._document)

  async def models(self, request: Request) -> Response:
    self._quota(request)
    return _json(ModelList(data=[self._card()]))

  async def model(self, request: Request) -> Response:
    self._quota(request)
    if (asked := request.path_params['id']) != self.served.name:
      raise no_such_model(asked, self.served)
    return _json(self._card())

  async def completions(self, request: Request) -> Response:
    return await self._serve(request, CompletionRequest, 'cmpl')

  async def chat(self, request: Request) -> Response:
    return await self._serve(request, ChatRequest, 'chatcmpl')

  async def explain(self, request: Request) -> Response:
    """Why the Conductor did what it did with a request of late."""
    tenant = self._quota(request).tenant
    seen = [
      each
      for each in self.recent.of_call(request.path_params['id'])
      if tenant.is_operator or each.owner == tenant.name
    ]
    if not seen:
      raise ApiError(404, 'There is no such request of late.', 'not_found')
    told = [explained(each, tenant.is_operator) for each in seen]
    return JSONResponse({'requests': told})

  def _card(self) -> ModelCard:
    served = self.served
    return ModelCard(
      id=served.name, created=served.created, max_model_len=served.max_tokens
    )

  def _quota(self, request: Request) -> Quota:
    """Whose request it is; raises `ApiError`."""
    if not self.tenants.has_keys:
      check_host(request)
    return self.tenants.of(request.headers.get('authorization'))

  def _operator(self, request: Request) -> None:
    """Raises `ApiError` unless whoever asks may see the whole server."""
    if not self._quota(request).tenant.is_operator:
      raise ApiError(403, 'Only an operator may see this.', 'forbidden')

  async def _serve(
    self, request: Request, schema: type[Body], prefix: str
  ) -> Response:
    """Reads, prepares, submits; what it returns answers."""
    came_s = time.perf_counter()  # its text is still to become tokens
    quota = self._quota(request)
    self.driver.check(1)  # before any work
    call_id = f'{prefix}-{uuid.uuid4().hex}'
    async with self._bodies.read(request) as raw:
      made = partial(self._prepared, raw, schema, call_id, quota)
      if len(raw) > INLINE_BYTES:
        loop = asyncio.get_running_loop()
        body, choices, writer = await loop.run_in_executor(self._threads, made)
      else:
        body, choices, writer = made()
    return Call(
      call_id,
      body,
      choices,
      writer,
      self.driver,
      quota,
      self.spec,
      came_s,
    )

  def _prepared(
    self, raw: bytes, schema: type[Body], call_id: str, quota: Quota
  ) -> tuple[Body, list[Choice], Writer]:
    """On any thread; raises `ApiError`."""
    try:
      body = schema.model_validate_json(raw)
    except ValidationError as error:
      raise invalid(error) from None
    served, salt = self.served, quota.tenant.salt
    choices = prepare(body, call_id, served, self.spec, salt)
    head = Answer(id=call_id, created=int(time.time()), model=served.name)
    if isinstance(body, ChatRequest):
      return body, choices, ChatWriter(body, served.codec, head)
    echoes = prompt_texts(body, served) if body.echo else ()
    if sum(map(len, echoes)) * body.num_answers > self.spec.max_body_bytes:
      raise ApiError(400, 'echo: too much text', 'too_long', 'echo')
    return body, choices, TextWriter(body, served.codec, head, echoes)

  @asynccontextmanager
  async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
    self.driver.start()
    try:
      yield
    finally:
      await self.driver.stop(STOP_TIMEOUT_S)
      self._threads.shutdown(wait=False, cancel_futures=True)


def _json(value: BaseModel, status: int = 200) -> Response:
  body = value.model_dump_json()
  return Response(body, status, media_type='application/json')


async def _refuse(request: Request, error: Exception) -> Response:
  assert isinstance(error, ApiError)
  return Response(
    error.body, error.status, error.headers, media_type='application/json'
  )


async def _refuse_http(request: Request, error: Exception) -> Response:
  """No such path, or not with this method."""
  assert isinstance(error, HTTPException)
  code = {404: 'not_found', 405: 'method_not_allowed'}.get(error.status_code)
  headers = error.headers or {}
  found = ApiError(error.status_code, error.detail, code, headers=headers)
  return await _refuse(request, found)


async def _nobody(request: Request, error: Exception) -> Response:
  """The client went while it sent its body: nobody reads this."""
  return Response(status_code=400)


async def _broken(request: Request, error: Exception) -> Response:
  """Says nothing of what is broken; the log does."""
  return await _refuse(request, ApiError(500, 'The server failed.', 'failed'))
