# SPDX-License-Identifier: Apache-2.0
"""Qwen-Bailian traces (alibaba-edu/qwen-bailian-usagetraces-anon), JSON lines.

  {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "turn": 2,
   "input_length": 40, "output_length": 132, "type": "text",
   "hash_ids": [1089, 6326, 7]}

As Mooncake's, but `timestamp` is in seconds and an id names 16 tokens. What a
turn answers to (`parent_chat_id`) is not used: requests come at their times.
"""

from dataclasses import replace
from itertools import count
from pathlib import Path

from mooncake_jax.workload.json_lines import count_of
from mooncake_jax.workload.json_lines import number_of
from mooncake_jax.workload.json_lines import parse_object
from mooncake_jax.workload.json_lines import read_lines
from mooncake_jax.workload.json_lines import value_of
from mooncake_jax.workload.trace import hash_ids_of
from mooncake_jax.workload.trace import note_backwards
from mooncake_jax.workload.trace import TraceRow

BAILIAN_TOKENS_PER_HASH_ID = 16
_MAX_SECONDS = 1e9


def load_bailian(path: str | Path) -> tuple[list[TraceRow], list[str]]:
  """All rows, and the errors of bad lines, which cost themselves alone.

  Where a line has ids of its complete blocks only, its tail gets one that no
  other has.

  Raises:
    OSError: the file can't be opened.
  """
  rows, errors = read_lines(path, parse_bailian)
  note_backwards(rows, path)
  return _with_tails(rows), errors


def parse_bailian(
  line: str | bytes, file: str | Path, line_number: int
) -> TraceRow:
  """Reads one line; its tail may lack an id.

  Raises:
    ValueError: one line that names file, line number, field and value.
  """
  where = f'{file}:{line_number}'
  fields = parse_object(line, where)
  value_of(fields, 'chat_id', where)  # Else it is another kind of trace.
  input_tokens = count_of(fields, 'input_length', where)
  row = TraceRow(
    number_of(fields, 'timestamp', where, _MAX_SECONDS),
    input_tokens,
    count_of(fields, 'output_length', where),
    hash_ids_of(fields, where),
  )
  complete, tail = divmod(input_tokens, BAILIAN_TOKENS_PER_HASH_ID)
  if len(row.hash_ids) not in (complete, complete + (tail > 0)):
    raise ValueError(
      f'{where}: len(hash_ids)={len(row.hash_ids)} but input_length='
      f'{input_tokens} makes {complete} complete blocks of '
      f'{BAILIAN_TOKENS_PER_HASH_ID} tokens'
    )
  return row


def _with_tails(rows: list[TraceRow]) -> list[TraceRow]:
  largest = max((max(row.hash_ids, default=0) for row in rows), default=0)
  new_ids, size = count(largest + 1), BAILIAN_TOKENS_PER_HASH_ID
  return [
    row
    if len(row.hash_ids) * size >= row.input_tokens
    else replace(row, hash_ids=(*row.hash_ids, next(new_ids)))
    for row in rows
  ]
