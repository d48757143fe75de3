# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, from the pydantic models that the server uses."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mooncake_jax.gateway.answers import ChatChunk
from mooncake_jax.gateway.answers import ChatCompletion
from mooncake_jax.gateway.answers import Completion
from mooncake_jax.gateway.answers import Health
from mooncake_jax.gateway.answers import ModelCard
from mooncake_jax.gateway.answers import ModelList
from mooncake_jax.gateway.errors import ErrorBody
from mooncake_jax.gateway.schema import ChatRequest
from mooncake_jax.gateway.schema import CompletionRequest

BODIES = (CompletionRequest, ChatRequest)
ANSWERS = (
  Completion,
  ChatCompletion,
  ChatChunk,
  ModelList,
  ModelCard,
  Health,
  ErrorBody,
)
# What any endpoint may refuse with.
_REFUSALS = {
  400: 'not what can be served',
  401: 'no valid API key',
  403: 'not for this tenant, or by a foreign name',
  404: 'no such thing',
  408: 'the body took too long',
  413: 'the body is too long',
  415: 'the body is not application/json',
  429: 'too much; Retry-After says when to ask again',
  503: 'stopping, failed, or too busy',
  504: 'the request took too long',
}

# One server-sent event, as those who read documents see it.
_EVENT = {'type': 'object', 'properties': {'data': {'type': 'string'}}}


def document(version: str, model_name: str) -> dict[str, Any]:
  """OpenAPI 3.1 of a server of this model."""
  _, schemas = models_json_schema(
    [
      *[(body, 'validation') for body in BODIES],
      *[(answer, 'serialization') for answer in ANSWERS],
    ],
    ref_template='#/components/schemas/{model}',
  )
  for body in BODIES:
    # Whoever makes requests of the document makes some that are served.
    schemas['$defs'][body.__name__]['properties']['model']['enum'] = [
      model_name
    ]
  return {
    'openapi': '3.1.0',
    'info': {'title': 'mooncake_jax', 'version': version},
    'paths': _paths(),
    'components': {
      'schemas': schemas['$defs'],
      'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}},
    },
    'security': [{}, {'key': []}],
  }


def _paths() -> dict[str, Any]:
  return {
    '/v1/completions': {
      'post': _post('completions', CompletionRequest, Completion, Completion)
    },
    '/v1/chat/completions': {
      'post': _post('chat', ChatRequest, ChatCompletion, ChatChunk)
    },
    '/v1/models': {'get': _get('models', ModelList)},
    '/v1/models/{id}': {'get': _get('model', ModelCard, 'id')},
    '/v1/conductor/explain/{id}': {'get': _get('explain', None, 'id')},
    '/health': {'get': _get('health', Health)},
    '/status.json': {'get': _get('status', None)},
    '/metrics': {'get': _get('metrics', None, content='text/plain')},
  }


def _post(
  name: str,
  body: type[BaseModel],
  whole: type[BaseModel],
  chunk: type[BaseModel],
) -> dict[str, Any]:
  """`chunk` is an event's of `stream=true`; the last one says [DONE]."""
  return {
    'operationId': name,
    'requestBody': {
      'required': True,
      'content': {'application/json': {'schema': _ref(body)}},
    },
    'responses': {
      '200': {
        'description': 'the answer, whole or as events',
        'content': {
          'application/json': {'schema': _ref(whole)},
          # Of each event's data, but for the last one's.
          'text/event-stream': {'schema': _EVENT, 'x-event': _ref(chunk)},
        },
      },
      **_refusals(),
    },
  }


def _get(
  name: str,
  answer: type[BaseModel] | None,
  parameter: str = '',
  content: str = 'application/json',
) -> dict[str, Any]:
  schema = {} if answer is None else _ref(answer)
  found: dict[str, Any] = {
    'operationId': name,
    'responses': {
      '200': {'description': name, 'content': {content: {'schema': schema}}},
      **_refusals(),
    },
  }
  if parameter:
    found['parameters'] = [
      {
        'name': parameter,
        'in': 'path',
        'required': True,
        'schema': {'type': 'string', 'minLength': 1},
      }
    ]
  return found


def _refusals() -> dict[str, Any]:
  content = {'application/json': {'schema': _ref(ErrorBody)}}
  return {
    str(status): {'description': why, 'content': content}
    for status, why in _REFUSALS.items()
  }


def _ref(model: type[BaseModel]) -> dict[str, str]:
  return {'$ref': f'#/components/schemas/{model.__name__}'}
