# SPDX-License-Identifier: Apache-2.0
"""Logs of OpenAI-style requests, JSON lines, become trace rows by a tokenizer.

  {"timestamp": "2026-03-01T10:00:00.250Z", "body": {"messages":
   [{"role": "user", "content": "..."}], "max_tokens": 200}, "response":
   {"usage": {"completion_tokens": 83}}, "tenant": "acme"}
  {"timestamp": 1772359200.25, "prompt": "...", "output_tokens": 83}

The body's fields may stand at the top. `timestamp` (`created`, `arrival_s`) is
in seconds or a date. A prompt is a text, token ids, or a chat. An output is as
long as what was put out (`output_tokens`, `usage.completion_tokens`), else as
its limit (`max_completion_tokens`, `max_tokens`), else a default, and that is
told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from datetime import UTC
from pathlib import Path
from typing import Any
from typing import Protocol

import numpy as np

from mooncake_jax.workload.json_lines import count_of
from mooncake_jax.workload.json_lines import number_of
from mooncake_jax.workload.json_lines import parse_object
from mooncake_jax.workload.json_lines import read_lines
from mooncake_jax.workload.json_lines import short
from mooncake_jax.workload.session_file import Message
from mooncake_jax.workload.session_file import ROLES
from mooncake_jax.workload.trace import note_backwards
from mooncake_jax.workload.trace import TraceRow

LOG_TOKENS_PER_HASH_ID = 16
_TIMES = ('timestamp', 'created', 'arrival_s')
_LIMITS = ('max_completion_tokens', 'max_tokens')
_MAX_SECONDS = 1e11


class Encoder(Protocol):
  """What reading a log needs of a tokenizer."""

  def encode(self, text: str) -> list[int]: ...

  def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...


@dataclass(frozen=True)
class LoggedRequest:
  """A line, read and tokenized; `output_tokens` is None if it doesn't say."""

  time_s: float
  prompt: tuple[int, ...]
  output_tokens: int | None
  tenant: str


def load_request_log(
  path: str | Path,
  encoder: Encoder,
  tenant_field: str = 'tenant',
  default_output_tokens: int = 256,
) -> tuple[list[TraceRow], list[str]]:
  """The rows, whose ids stand for 16 tokens, and the errors of bad lines.

  Args:
    tenant_field: what separates prompts: those of two tenants share nothing.
    default_output_tokens: of lines that say nothing of the output.

  Raises:
    OSError: the file can't be opened.
  """

  def parse(line: bytes, file: str | Path, number: int) -> LoggedRequest:
    return parse_logged(line, file, number, encoder, tenant_field)

  found, errors = read_lines(path, parse)
  if silent := sum(request.output_tokens is None for request in found):
    errors.append(
      f'{path}: {silent} requests do not say how long their output is: '
      f'{default_output_tokens} tokens assumed'
    )
  first_s = min((request.time_s for request in found), default=0.0)
  hash_ids = HashIds()
  rows = [
    TraceRow(
      round(request.time_s - first_s, 6),
      len(request.prompt),
      request.output_tokens or default_output_tokens,
      hash_ids.of(request.prompt, request.tenant),
      tenant=request.tenant,
    )
    for request in found
  ]
  note_backwards(rows, path)
  return rows, errors


class HashIds:
  """Numbers of blocks of 16 tokens, equal where all up to them is equal."""

  def __init__(self):
    self._ids: dict[tuple[int | str, bytes], int] = {}

  def of(self, prompt: Sequence[int], tenant: str = '') -> tuple[int, ...]:
    """One a started block, first block first."""
    tokens, size = np.array(prompt, np.int32), LOG_TOKENS_PER_HASH_ID
    parent: int | str = tenant
    found = []
    for start in range(0, len(tokens), size):
      key = parent, tokens[start : start + size].tobytes()
      parent = self._ids.setdefault(key, len(self._ids))
      found.append(parent)
    return tuple(found)


def parse_logged(
  line: str | bytes,
  file: str | Path,
  line_number: int,
  encoder: Encoder,
  tenant_field: str = 'tenant',
) -> LoggedRequest:
  """Reads one line.

  Raises:
    ValueError: one line that names file, line number, field and value.
  """
  where = f'{file}:{line_number}'
  fields = parse_object(line, where)
  body = fields.get('body', fields)
  if not isinstance(body, dict):
    raise ValueError(f'{where}: body={short(body)} must be an object')
  prompt = _prompt(body, where, encoder)
  if not prompt:
    raise ValueError(f'{where}: the prompt is empty')
  tenant = fields.get(tenant_field, body.get(tenant_field, ''))
  if not isinstance(tenant, str):
    raise ValueError(f'{where}: {tenant_field}={short(tenant)} must be a text')
  return LoggedRequest(
    _time_s(fields, where), prompt, _output_tokens(fields, body, where), tenant
  )


def _time_s(fields: dict[str, Any], where: str) -> float:
  name = next((name for name in _TIMES if name in fields), _TIMES[0])
  value = fields.get(name)
  if not isinstance(value, str):
    return number_of(fields, name, where, _MAX_SECONDS)
  try:
    time = datetime.fromisoformat(value)
  except ValueError:
    raise ValueError(
      f'{where}: {name}={short(value)} must be seconds or a date and time'
    ) from None
  # Without a zone: what it is does not matter, if all lines have the same.
  return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _prompt(
  body: dict[str, Any], where: str, encoder: Encoder
) -> tuple[int, ...]:
  if 'messages' in body:
    messages = _messages(body['messages'], where)
    try:
      return tuple(encoder.encode_chat(messages))
    except ValueError as error:  # of the chat template, which knows no lines
      raise ValueError(f'{where}: messages: {error}') from None
  prompt = body.get('prompt')
  if isinstance(prompt, str):
    return tuple(encoder.encode(prompt))
  if isinstance(prompt, list) and all(map(_is_token, prompt)):
    return tuple(prompt)
  raise ValueError(
    f'{where}: needs messages, or a prompt that is a text or token ids, '
    f'found {short(prompt if "prompt" in body else [*body])}'
  )


def _is_token(value: Any) -> bool:
  return type(value) is int and 0 <= value < 2**31


def _messages(value: Any, where: str) -> list[Message]:
  if not isinstance(value, list) or not value:
    raise ValueError(
      f'{where}: messages={short(value)} must be a list, not empty'
    )
  found: list[Message] = []
  for i, message in enumerate(value):
    role = message.get('role') if isinstance(message, dict) else None
    if role == 'developer':
      role = 'system'
    if role not in ROLES:
      raise ValueError(
        f'{where}: messages[{i}]={short(message)} must have a role of {ROLES}'
      )
    content = _content(message.get('content'), f'{where}: messages[{i}]')
    found.append({'role': role, 'content': content})
  return found


def _content(content: Any, where: str) -> str:
  """A text, or the texts of parts."""
  texts: list[str] = []
  for part in content if isinstance(content, list) else [content]:
    text = part.get('text') if isinstance(part, dict) else part
    if not isinstance(text, str):
      raise ValueError(f'{where}.content={short(content)} must be text')
    texts.append(text)
  return ''.join(texts)


def _output_tokens(
  fields: dict[str, Any], body: dict[str, Any], where: str
) -> int | None:
  lookups: list[tuple[Any, str]] = [
    (fields, 'output_tokens'),
    (_usage(fields), 'completion_tokens'),
    (_usage(fields.get('response')), 'completion_tokens'),
    *((body, name) for name in _LIMITS),
  ]
  for found, name in lookups:
    # An answer that was refused or cut off at once has none.
    if isinstance(found, dict) and found.get(name):
      return count_of(found, name, where)
  return None


def _usage(fields: Any) -> Any:
  return fields.get('usage') if isinstance(fields, dict) else None
