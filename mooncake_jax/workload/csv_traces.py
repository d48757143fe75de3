# SPDX-License-Identifier: Apache-2.0
"""Published traces of lengths alone, as CSV: Azure 2023 and BurstGPT.

  TIMESTAMP,ContextTokens,GeneratedTokens            (Azure; Splitwise, ISCA'24)
  2023-11-16 18:15:46.6805900,374,44

  Timestamp,Model,Request tokens,Response tokens,...   (BurstGPT, 2401.17644)
  5,ChatGPT,472,18,490,Conversation log

They do not say what prompts share. Rows get hash ids that no other row has, and
`hashed` is False: nothing is reused, and nobody can say what would have been.
"""

from collections.abc import Iterable
from datetime import datetime
from itertools import count
from itertools import islice
from pathlib import Path

from mooncake_jax.workload.csv_lines import Fields
from mooncake_jax.workload.csv_lines import number_in
from mooncake_jax.workload.csv_lines import read_csv
from mooncake_jax.workload.csv_lines import whole_in
from mooncake_jax.workload.json_lines import short
from mooncake_jax.workload.trace import note_backwards
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow

# Arrival in seconds of some clock, prompt tokens, output tokens.
_Lengths = tuple[float, int, int]
# Near enough for microseconds to survive as floats.
_BEGIN = datetime(2000, 1, 1)


def load_azure(path: str | Path) -> tuple[list[TraceRow], list[str]]:
  """The rows of an Azure LLM inference trace, and the errors of bad lines.

  The first arrival is 0; tenths of microseconds are cut off.

  Raises:
    ValueError: the header has not these columns, the file is another one.
    OSError: the file can't be opened.
  """
  columns = ('TIMESTAMP', 'ContextTokens', 'GeneratedTokens')
  return _rows(path, *read_csv(path, columns, _azure))


def load_burstgpt(path: str | Path) -> tuple[list[TraceRow], list[str]]:
  """The rows of a BurstGPT trace, and the errors of bad lines.

  The first arrival is 0. Requests that failed (0 response tokens) were not
  served: they are left out, and one line says how many they were.

  Raises:
    ValueError: the header has not these columns, the file is another one.
    OSError: the file can't be opened.
  """
  columns = ('Timestamp', 'Request tokens', 'Response tokens')
  found, errors = read_csv(path, columns, _burstgpt)
  served = [lengths for lengths in found if lengths[1] and lengths[2]]
  if failed := len(found) - len(served):
    errors.append(f'{path}: {failed} requests with 0 tokens (they failed)')
  return _rows(path, served, errors)


def _azure(fields: Fields, where: str) -> _Lengths:
  text = fields['TIMESTAMP'].strip()
  try:
    arrival = datetime.fromisoformat(text)
  except ValueError:
    raise ValueError(
      f'{where}: TIMESTAMP={short(text)} must be a date and time'
    ) from None
  return (
    # Not timestamp(): that of a naive time depends on where it is asked.
    (arrival.replace(tzinfo=None) - _BEGIN).total_seconds(),
    whole_in(fields, 'ContextTokens', where, 1),
    whole_in(fields, 'GeneratedTokens', where, 1),
  )


def _burstgpt(fields: Fields, where: str) -> _Lengths:
  return (
    number_in(fields, 'Timestamp', where),
    whole_in(fields, 'Request tokens', where),
    whole_in(fields, 'Response tokens', where),
  )


def _rows(
  path: str | Path, found: Iterable[_Lengths], errors: list[str]
) -> tuple[list[TraceRow], list[str]]:
  found, ids = list(found), count()
  first_s = min((arrival_s for arrival_s, _, _ in found), default=0.0)
  rows = [
    TraceRow(
      # Whole microseconds: a difference of large numbers has noise below.
      round(arrival_s - first_s, 6),
      tokens,
      output_tokens,
      tuple(islice(ids, -(-tokens // TOKENS_PER_HASH_ID))),
      hashed=False,
    )
    for arrival_s, tokens, output_tokens in found
  ]
  note_backwards(rows, path)
  return rows, errors
