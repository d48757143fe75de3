# SPDX-License-Identifier: Apache-2.0
"""Which part of a long trace is simulated: its busiest, and what that leaves.

A part has its own arrivals and nothing of what was before it: caches are empty
when it begins, so it shows fewer hits than the whole trace has.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mooncake_jax.workload.trace import TraceRow


def busiest(
  rows: Sequence[TraceRow], num_requests: int, after: int = 0
) -> tuple[int, list[TraceRow]]:
  """The `num_requests` rows in a row with the most tokens a second.

  Args:
    rows: in order of arrival.
    after: so many of the busiest are passed over, and what overlaps them.

  Returns:
    The first one's index, and the rows, the first at 0 s. [] where no part of
    that length is left.
  """
  if len(rows) <= num_requests:
    return 0, _from_zero(rows) if not after else []
  loads = _loads(rows, num_requests)
  for _ in range(after + 1):
    start = int(np.argmax(loads))
    if loads[start] < 0:
      return 0, []
    taken = slice(max(start - num_requests + 1, 0), start + num_requests)
    best, loads[taken] = start, -1.0
  return best, _from_zero(rows[best : best + num_requests])


def _loads(rows: Sequence[TraceRow], num_requests: int) -> np.ndarray:
  """Tokens a second of each part, by its first row."""
  times_s = np.array([row.timestamp_s for row in rows])
  tokens = [row.input_tokens + row.output_tokens for row in rows]
  sums = np.concatenate([[0], np.cumsum(tokens)])
  last = np.arange(num_requests - 1, len(rows))
  first = last - num_requests + 1
  spans_s = times_s[last] - times_s[first]
  return (sums[last + 1] - sums[first]) / np.maximum(spans_s, 1e-3)


def _from_zero(rows: Sequence[TraceRow]) -> list[TraceRow]:
  first_s = rows[0].timestamp_s if rows else 0.0
  return [replace(row, timestamp_s=row.timestamp_s - first_s) for row in rows]
