# SPDX-License-Identifier: Apache-2.0
"""Refusals as OpenAI's API words them.

A message is of the request it answers, or of the server; never of another's.
"""

from collections.abc import Mapping
import math

from pydantic import BaseModel
from pydantic import ValidationError

from mooncake_jax.request import Rejection

# Of what a client sent, an error says so much at most.
MAX_MESSAGE = 300
MAX_MISTAKES = 256  # are worded within a millisecond


class ErrorDetail(BaseModel):
  message: str
  type: str
  param: str | None = None
  code: str | None = None
  # What the Conductor predicted of a request that it refused, in seconds.
  predicted_ttft_s: float | None = None
  predicted_tbt_s: float | None = None


class ErrorBody(BaseModel):
  error: ErrorDetail


class ApiError(Exception):
  """Ends a request with this status and body."""

  def __init__(
    self,
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    predicted: Mapping[str, float] | None = None,
  ):
    """`predicted` has seconds by the field of `ErrorDetail`."""
    super().__init__(message)
    self.status = status
    self.headers = dict(headers or {})
    self.detail = ErrorDetail(
      message=message[:MAX_MESSAGE],
      type=_type(status),
      param=param,
      code=code,
      **(predicted or {}),
    )

  @property
  def body(self) -> bytes:
    made = ErrorBody(error=self.detail)
    return made.model_dump_json(exclude_unset=True).encode()


def _type(status: int) -> str:
  if status == 429:
    return 'rate_limit_error'
  if status in (401, 403):
    return 'authentication_error'
  return 'server_error' if status >= 500 else 'invalid_request_error'


def rejected(rejection: Rejection) -> ApiError:
  """The Conductor's early 'no', with what it predicted."""
  reason = {
    'ttft': 'the first token would come too late',
    'tbt': 'tokens would come too slowly',
    'no_instance': 'no instance can take it',
  }.get(rejection.reason, rejection.reason)
  return too_many(
    f'The cluster is overloaded: {reason}.',
    f'overloaded_{rejection.reason}',
    rejection.retry_after_s,
    {
      'predicted_ttft_s': rejection.ttft_s,
      'predicted_tbt_s': rejection.tbt_s,
    },
  )


def too_many(
  message: str,
  code: str,
  retry_after_s: float | None = None,
  predicted: Mapping[str, float] | None = None,
) -> ApiError:
  """A 429; without `Retry-After` where asking again never helps."""
  headers = {}
  if retry_after_s is not None and math.isfinite(retry_after_s):
    headers['retry-after'] = str(max(1, math.ceil(retry_after_s)))
    headers['retry-after-ms'] = str(max(1, math.ceil(retry_after_s * 1e3)))
  for name, seconds in (predicted or {}).items():
    headers[f'x-{name.replace("_", "-")}'] = f'{seconds:.6g}'
  return ApiError(429, message, code, None, headers, predicted)


def invalid(error: ValidationError) -> ApiError:
  """A body that is not what the schema asks for: its first mistake.

  Of very many only their number: pydantic words all or none.
  """
  if (count := error.error_count()) > MAX_MISTAKES:
    return ApiError(400, f'The body has {count} mistakes.', 'invalid_value')
  first = error.errors(include_url=False, include_input=False)[0]
  # Of a place in the body its field: unions name their members besides.
  param = str(first['loc'][0]) if first['loc'] else None
  if first['type'] == 'extra_forbidden':
    message, code = f'{param}: unknown or not supported', 'unknown_parameter'
  elif first['type'] == 'missing':
    message, code = f'{param}: is required', 'missing_required_parameter'
  elif first['type'].startswith('json'):
    message, code = f'The body is not JSON: {first["msg"]}', 'invalid_json'
  else:
    message, code = f'{param}: {first["msg"]}', 'invalid_value'
  return ApiError(400, message, code, param)
