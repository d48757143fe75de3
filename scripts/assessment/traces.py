# SPDX-License-Identifier: Apache-2.0
"""A trace of any supported format, found out by its first line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mooncake_jax.workload.json_lines import parse_object
from mooncake_jax.workload.json_lines import short
from mooncake_jax.workload.request_log import Encoder
from mooncake_jax.workload.request_log import load_request_log
from mooncake_jax.workload.request_log import LOG_TOKENS_PER_HASH_ID
from mooncake_jax.workload.session_file import Message
from scripts.workloads import from_file
from scripts.workloads import Rows
from scripts.workloads import TraceFormat

RequestLog = Literal['requests']
REQUEST_LOG: RequestLog = 'requests'


class NoTokenizer:
  """Stands in where none is given: a log of token ids needs none."""

  def encode(self, text: str) -> list[int]:
    raise ValueError(f'--tokenizer is not given, but needed for {short(text)}')

  def encode_chat(self, messages: Sequence[Message]) -> list[int]:
    return self.encode(messages[-1]['content'])


def read_trace(
  path: Path,
  tokenizer: Path | None = None,
  tenant_field: str = 'tenant',
) -> tuple[str, Rows]:
  """The format's name and the rows, in order of arrival.

  Args:
    tokenizer: folder or GGUF file of a model, for logs with texts.
    tenant_field: see `load_request_log`.

  Raises:
    ValueError: no format has such lines, or not one line can be read.
    OSError: there is no such file.
  """
  name = trace_format(path)
  if name == REQUEST_LOG:
    encoder = NoTokenizer() if tokenizer is None else _encoder(tokenizer)
    rows, errors = load_request_log(path, encoder, tenant_field)
    if not rows:
      raise ValueError(f'no request can be read: {(errors or [path])[0]}')
    read = Rows(rows, errors, LOG_TOKENS_PER_HASH_ID)
  else:
    read = from_file(str(path), name)
  ordered = sorted(read.rows, key=lambda row: row.timestamp_s)
  return name, Rows(ordered, read.errors, read.tokens_per_hash_id)


def trace_format(path: Path) -> TraceFormat | RequestLog:
  """'mooncake', 'bailian', 'azure', 'burstgpt' or 'requests'.

  Raises:
    ValueError: it looks like none of them.
    OSError: there is no such file.
  """
  with path.open('rb') as file:
    first = next((line for line in file if line.strip()), b'').lstrip(
      b'\xef\xbb\xbf'
    )
  if not first:
    raise ValueError(f'{path}: has no line')
  columns = {name.strip() for name in first.decode(errors='replace').split(',')}
  if {'TIMESTAMP', 'ContextTokens'} <= columns:
    return 'azure'
  if {'Timestamp', 'Request tokens'} <= columns:
    return 'burstgpt'
  try:
    fields = parse_object(first, f'{path}:1')
  except ValueError as error:
    raise ValueError(f'{error}; nor a header of a known CSV trace') from None
  if 'hash_ids' in fields:
    return 'bailian' if 'chat_id' in fields else 'mooncake'
  if fields.keys() & {'body', 'messages', 'prompt'}:
    return REQUEST_LOG
  raise ValueError(
    f'{path}:1: neither hash_ids nor body, messages or prompt, found '
    f'{short([*fields])}'
  )


def _encoder(path: Path) -> Encoder:
  from mooncake_jax.model.tokenizer import Tokenizer

  read = Tokenizer.from_folder if path.is_dir() else Tokenizer.from_gguf
  return read(path)
