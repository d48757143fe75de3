# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of one request, exact without expanding segments.

A `TokenSegment` of n tokens has n - 1 equal intervals, and between two
segments lies one more. So a request's intervals are a short list of (seconds,
how many), however many tokens it has.
"""

from collections.abc import Sequence
import math

from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment

# (interval_s, how many of them), in the order they passed.
Intervals = list[tuple[float, int]]


def intervals(segments: Sequence[TokenSegment]) -> Intervals:
  """All intervals between tokens: one fewer than there are tokens.

  Segments of 3 tokens (0.1 s apart) and of 1, 0.5 s later:
  [(0.1, 2), (0.5, 1)].
  """
  found: Intervals = []
  last_s = None
  for segment in segments:
    if last_s is not None:
      found.append((segment.first_s - last_s, 1))
    if segment.count > 1:
      found.append((segment.interval_s, segment.count - 1))
    last_s = segment.last_s
  return found


def tbt_tail_s(record: RequestRecord) -> float | None:
  """TBT as in FAST'25 section 5.1: mean of the longest 10 % of intervals.

  Of n intervals the longest ceil(n / 10), at least one. None with fewer than
  two tokens.
  """
  found = sorted(intervals(record.segments), reverse=True)
  total = sum(count for _, count in found)
  if not total:
    return None
  longest = left = -(-total // 10)
  sum_s = 0.0
  for interval_s, count in found:
    taken = min(count, left)
    sum_s += interval_s * taken
    left -= taken
  return sum_s / longest


def tpot_s(record: RequestRecord) -> float | None:
  """Time per output token after the first: the mean interval.

  None with fewer than two tokens.
  """
  found = intervals(record.segments)
  total = sum(count for _, count in found)
  if not total:
    return None
  return sum(interval_s * count for interval_s, count in found) / total


def longest_gap_s(record: RequestRecord) -> float | None:
  """The longest interval; None with fewer than two tokens."""
  return max((gap_s for gap_s, _ in intervals(record.segments)), default=None)


def tbt_percentile(record: RequestRecord, percent: float) -> float | None:
  """The interval that `percent` (0 to 100) of a request's are at most.

  Linear between two neighbours, as numpy's. None with fewer than two tokens.
  """
  assert 0 <= percent <= 100, f'{percent=}'
  found = sorted(intervals(record.segments))
  total = sum(count for _, count in found)
  if not total:
    return None
  rank = (total - 1) * percent / 100
  low = _nth(found, math.floor(rank))
  high = _nth(found, math.ceil(rank))
  return low + (high - low) * (rank - math.floor(rank))


def _nth(ascending: Intervals, n: int) -> float:
  """The n-th shortest interval, from 0."""
  for interval_s, count in ascending:
    if n < count:
      return interval_s
    n -= count
  raise IndexError(n)
