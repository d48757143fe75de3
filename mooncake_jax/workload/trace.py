# SPDX-License-Identifier: Apache-2.0
"""Mooncake JSONL traces: one request a line.

  {"timestamp": 3000, "input_length": 1300, "output_length": 52,
   "hash_ids": [0, 7, 9]}

`timestamp` is in milliseconds from the start (seconds everywhere in this
library: divided once, here). `hash_ids` name the prompt's 512-token blocks;
two prompts share a prefix exactly as far as they share ids, and the last id is
a partial block unless 512 divides the length, so there are always
ceil(input_length / 512) of them. Only prompts are hashed: what a request put
out shows as new ids in its next turn. As in FAST'25 section 5.1 (the format of
its published traces).
"""

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
import json
import logging
import os
from pathlib import Path
from typing import Any
import weakref

from mooncake_jax.workload.json_lines import count_of
from mooncake_jax.workload.json_lines import number_of
from mooncake_jax.workload.json_lines import parse_object
from mooncake_jax.workload.json_lines import short
from mooncake_jax.workload.json_lines import value_of

TOKENS_PER_HASH_ID = 512
# An id seeds a 64-bit generator and is hashed as 8 bytes.
_MAX_HASH_ID = 2**63
_MAX_TIMESTAMP_MS = 2**53  # whole ms beyond this are no floats


@dataclass(frozen=True, slots=True)
class TraceRow:
  """One request of a trace.

  Attributes:
    timestamp_s: arrival, from the start of the trace.
    input_tokens, output_tokens: lengths, at least 1.
    hash_ids: one a started block of the prompt, first block first.
    hashed: whether the trace has them. Where it does not, they are made up,
      no two alike, and nobody knows what could be reused.
    tenant: whose it is; prompts of two tenants share nothing.
  """

  timestamp_s: float
  input_tokens: int
  output_tokens: int
  hash_ids: tuple[int, ...]
  hashed: bool = True
  tenant: str = ''


def parse_row(
  line: str | bytes,
  file: str | Path,
  line_number: int,
  tokens_per_hash_id: int = TOKENS_PER_HASH_ID,
) -> TraceRow:
  """Reads one line.

  Raises:
    ValueError: one line that names file, line number, field and value: no
      JSON object, a missing key, a negative or fractional value, an empty
      prompt or output, or not as many hash_ids as the length has blocks.
  """
  where = f'{file}:{line_number}'
  fields = parse_object(line, where)
  timestamp_ms = number_of(fields, 'timestamp', where, _MAX_TIMESTAMP_MS)
  input_tokens = count_of(fields, 'input_length', where)
  output_tokens = count_of(fields, 'output_length', where)
  hash_ids = hash_ids_of(fields, where)
  num_blocks = -(-input_tokens // tokens_per_hash_id)
  if len(hash_ids) != num_blocks:
    raise ValueError(
      f'{where}: len(hash_ids)={len(hash_ids)} but input_length='
      f'{short(input_tokens)} makes {short(num_blocks)} blocks of '
      f'{tokens_per_hash_id} tokens'
    )
  return TraceRow(timestamp_ms / 1000, input_tokens, output_tokens, hash_ids)


class TraceSource(Sequence[TraceRow]):
  """The rows of a file by index: a grain `RandomAccessDataSource`.

    grain.MapDataset.source(TraceSource(path)).shuffle(0)[:100]

  Reads each row from the file when asked. Safe to use from many threads and to
  send to other processes, which open the file again. Blank lines are no rows;
  the last line needs no newline.
  """

  def __init__(
    self, path: str | Path, tokens_per_hash_id: int = TOKENS_PER_HASH_ID
  ):
    self.path = str(path)
    self.tokens_per_hash_id = tokens_per_hash_id
    # (line number, first byte, bytes) of each row.
    self._lines = list(_index_lines(self.path))
    self._open()

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, index: Any) -> Any:
    """The row of an int, or the list of rows of a slice.

    Raises:
      ValueError: as `parse_row` does.
    """
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    number, offset, size = self._lines[index]
    # Not seek and read: threads share the file's position.
    line = os.pread(self._descriptor, size, offset)
    return parse_row(line, self.path, number, self.tokens_per_hash_id)

  def __repr__(self) -> str:
    return f'TraceSource({self.path!r}, {self.tokens_per_hash_id})'

  def __getstate__(self) -> dict[str, Any]:
    state = dict(self.__dict__)
    del state['_descriptor']
    return state

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._open()

  def _open(self) -> None:
    self._descriptor = os.open(self.path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._descriptor)


def load_trace(
  path: str | Path, tokens_per_hash_id: int = TOKENS_PER_HASH_ID
) -> tuple[list[TraceRow], list[str]]:
  """Reads all rows, in the file's order, and the errors of the bad ones.

  Requests are independent, so a bad line costs itself alone: its one-line
  error is kept and the rest is read. Timestamps that go backwards are allowed
  and logged as one warning.

  Raises:
    OSError: the file can't be opened.
  """
  source = TraceSource(path, tokens_per_hash_id)
  rows, errors = [], []
  for i in range(len(source)):
    try:
      rows.append(source[i])
    except ValueError as error:
      errors.append(str(error))
  note_backwards(rows, source.path)
  return rows, errors


def write_trace(path: str | Path, rows: Sequence[TraceRow]) -> None:
  """Writes rows in the published format, timestamps to the nearest ms.

  It has no way to say that ids were made up (`TraceRow.hashed`).
  """
  with open(path, 'w', encoding='utf-8') as file:
    for row in rows:
      fields = {
        'timestamp': round(row.timestamp_s * 1000),
        'input_length': row.input_tokens,
        'output_length': row.output_tokens,
        'hash_ids': list(row.hash_ids),
      }
      file.write(json.dumps(fields) + '\n')


def _index_lines(path: str) -> Iterator[tuple[int, int, int]]:
  offset = 0
  with open(path, 'rb') as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        yield number, offset, len(line)
      offset += len(line)


def note_backwards(rows: Sequence[TraceRow], path: str | Path) -> None:
  """Warns once where timestamps of a file go backwards."""
  times = [row.timestamp_s for row in rows]
  count = sum(b < a for a, b in pairwise(times))
  if count:
    logging.getLogger(__name__).warning(
      '%s: timestamp goes backwards at %d rows', path, count
    )


def hash_ids_of(fields: dict[str, Any], where: str) -> tuple[int, ...]:
  """The list of ids of a line, however many.

  Raises:
    ValueError: it is missing, no list, or has something that is no id.
  """
  values = value_of(fields, 'hash_ids', where)
  if not isinstance(values, list):
    raise ValueError(f'{where}: hash_ids={short(values)} must be a list')
  for i, value in enumerate(values):
    if type(value) is not int or not 0 <= value < _MAX_HASH_ID:
      raise ValueError(
        f'{where}: hash_ids[{i}]={short(value)} must be an integer >= 0'
      )
  return tuple(values)
