# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of one request, exact from its segments.

A `TokenSegment` of n tokens has n - 1 intervals, equal or growing evenly, and
between two segments lies one more. Equal ones are counted, however many they
are; growing ones are written out.
"""

from collections.abc import Sequence
import heapq
import math
from typing import NamedTuple

import numpy as np

from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment


class Intervals(NamedTuple):
  """Different intervals and how many there are of each.

  Attributes:
    seconds: float [I].
    counts: int [I].
  """

  seconds: np.ndarray
  counts: np.ndarray


def intervals(segments: Sequence[TokenSegment]) -> Intervals:
  """All intervals between tokens, fewer by one than these, in no order.

  Segments of 3 tokens (0.1 s apart) and of 1, 0.5 s later: 0.1 twice, 0.5.
  """
  equal_s: list[float] = []
  counts: list[int] = []
  growing_s: list[np.ndarray] = []
  last_s = None
  for segment in segments:
    if last_s is not None:
      equal_s.append(segment.first_s - last_s)
      counts.append(1)
    gaps = segment.count - 1
    if gaps and segment.growth_s:
      grown_s = segment.growth_s * np.arange(gaps)
      growing_s.append(segment.interval_s + grown_s)
    elif gaps:
      equal_s.append(segment.interval_s)
      counts.append(gaps)
    last_s = segment.last_s
  seconds = np.concatenate([np.array(equal_s), *growing_s])
  all_counts = np.ones(len(seconds), np.int64)
  all_counts[: len(counts)] = counts
  return Intervals(seconds, all_counts)


def tbt_tail_s(record: RequestRecord) -> float | None:
  """A request's TBT as in FAST'25 section 5.1."""
  return tail_s(record.segments)


def tail_s(segments: Sequence[TokenSegment]) -> float | None:
  """Mean of the longest 10 % of intervals.

  Of n intervals the longest ceil(n / 10), at least one. None with fewer than
  two tokens.
  """
  total = sum([segment.count for segment in segments]) - 1
  if total < 1:
    return None
  longest = left = -(-total // 10)
  gaps, sum_s = _longest_first(segments), 0.0
  while left:
    negative_s, fall_s, count = heapq.heappop(gaps)
    count = taken = min(count, left)
    if fall_s and gaps:  # as far as no other gap is longer
      ahead_s = gaps[0][0] - negative_s
      if ahead_s < fall_s * count:
        taken = min(count, int(ahead_s / fall_s) + 1)
    sum_s -= taken * negative_s + fall_s * (taken * (taken - 1) / 2)
    left -= taken
    if taken < count:
      rest = negative_s + taken * fall_s, fall_s, count - taken
      heapq.heappush(gaps, rest)
  return sum_s / longest


def _longest_first(
  segments: Sequence[TokenSegment],
) -> list[tuple[float, float, int]]:
  """A heap of the gaps that differ evenly: (-the longest, by how much, how
  many)."""
  gaps: list[tuple[float, float, int]] = []
  last_s = None
  for segment in segments:
    if last_s is not None:
      gaps.append((last_s - segment.first_s, 0.0, 1))
    count, growth_s = segment.count - 1, segment.growth_s
    if count > 0:
      longest_s = segment.interval_s + max(growth_s * (count - 1), 0.0)
      gaps.append((-longest_s, abs(growth_s), count))
    last_s = segment.last_s
  heapq.heapify(gaps)
  return gaps


def tpot_s(record: RequestRecord) -> float | None:
  """Time per output token after the first: the mean interval.

  None with fewer than two tokens.
  """
  gaps, segments = record.num_output_tokens - 1, record.segments
  if gaps < 1:
    return None
  return (segments[-1].last_s - segments[0].first_s) / gaps


def longest_gap_s(record: RequestRecord) -> float | None:
  """The longest interval; None with fewer than two tokens."""
  gaps_s: list[float] = []
  last_s = None
  for segment in record.segments:
    if last_s is not None:
      gaps_s.append(segment.first_s - last_s)
    if segment.count > 1:  # they grow evenly: the last one or the first
      growth_s = (segment.count - 2) * segment.growth_s
      gaps_s += (segment.interval_s, segment.interval_s + growth_s)
    last_s = segment.last_s
  return max(gaps_s, default=None)


def tbt_percentile(record: RequestRecord, percent: float) -> float | None:
  """The interval that `percent` (0 to 100) of a request's are at most.

  Linear between two neighbours, as numpy's. None with fewer than two tokens.
  """
  assert 0 <= percent <= 100, f'{percent=}'
  seconds, counts = intervals(record.segments)
  total = int(counts.sum())
  if not total:
    return None
  rising = np.argsort(seconds)
  upto, rank = np.cumsum(counts[rising]), (total - 1) * percent / 100
  ends = [math.floor(rank), math.ceil(rank)]
  low, high = seconds[rising[np.searchsorted(upto, ends, side='right')]]
  return float(low + (high - low) * (rank - ends[0]))
