# SPDX-License-Identifier: Apache-2.0
"""What a trace is like: lengths, rate, and how much of it could be reused."""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow


@dataclass(frozen=True)
class Lengths:
  """Mean, percentiles and extremes, in tokens."""

  mean: float
  p50: float
  p90: float
  p99: float
  minimum: int
  maximum: int


@dataclass(frozen=True)
class TraceStatistics:
  """Figures of the tables of FAST'25 section 5.1 and a few more.

  Attributes:
    duration_s: first to last arrival.
    num_blocks, num_unique_blocks: started blocks, tails included.
    hit_rate: tokens of leading blocks that an earlier request had too, over
      all prompt tokens: the most that a store without bounds could reuse.
    hit_rate_request_mean: mean of the requests' own ratios.
    hit_requests: share of requests that reuse at least one block.
    hottest_block_requests: requests that have the most frequent block.
      These four are None of a trace without hashes, which can't know them.
  """

  num_requests: int
  duration_s: float
  input_tokens: Lengths
  output_tokens: Lengths
  num_blocks: int
  num_unique_blocks: int
  hit_rate: float | None
  hit_rate_request_mean: float | None
  hit_requests: float | None
  hottest_block_requests: int | None


UNKNOWN = dict.fromkeys(
  'hit_rate hit_rate_request_mean hit_requests hottest_block_requests'.split()
)


def trace_statistics(
  rows: Sequence[TraceRow], tokens_per_hash_id: int = TOKENS_PER_HASH_ID
) -> TraceStatistics:
  """Measures rows in their order.

  Raises:
    ValueError: there are none.
  """
  if not rows:
    raise ValueError(f'trace_statistics: {len(rows)=} must be >= 1')
  times_s = [row.timestamp_s for row in rows]
  inputs = [row.input_tokens for row in rows]
  hits, uses = _reuse(rows, tokens_per_hash_id)
  return TraceStatistics(
    num_requests=len(rows),
    duration_s=max(times_s) - min(times_s),
    input_tokens=_lengths(inputs),
    output_tokens=_lengths([row.output_tokens for row in rows]),
    num_blocks=sum(uses.values()),
    num_unique_blocks=len(uses),
    **(_hits(hits, inputs, uses) if all(r.hashed for r in rows) else UNKNOWN),
  )


def _hits(
  hits: Sequence[int], inputs: Sequence[int], uses: Mapping[int, int]
) -> dict[str, Any]:
  return {
    'hit_rate': sum(hits) / sum(inputs),
    'hit_rate_request_mean': float(np.mean(np.divide(hits, inputs))),
    'hit_requests': float(np.mean([hit > 0 for hit in hits])),
    'hottest_block_requests': max(uses.values()),
  }


def _reuse(
  rows: Sequence[TraceRow], tokens_per_hash_id: int
) -> tuple[list[int], dict[int, int]]:
  """Reusable tokens of each row, and uses of each hash id."""
  uses: dict[int, int] = {}
  hits = []
  for row in rows:
    misses = (i for i, id_ in enumerate(row.hash_ids) if id_ not in uses)
    blocks = next(misses, len(row.hash_ids))
    hits.append(min(blocks * tokens_per_hash_id, row.input_tokens))
    for id_ in row.hash_ids:
      uses[id_] = uses.get(id_, 0) + 1
  return hits, uses


def _lengths(values: Sequence[int]) -> Lengths:
  p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
  return Lengths(
    float(np.mean(values)), p50, p90, p99, min(values), max(values)
  )
