# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is cut into chunks.

'fixed' chunks have one size, so each takes longer than the last: it attends
to more. 'dynamic' ones shrink instead, so that every chunk takes as long as
the first one would without a prefix, t(L, x) = t(0, chunk_tokens), and the
stages of a pipeline stay in step (docs/architecture.md, Costs).
"""

import math
from typing import get_args
from typing import Literal

from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import PolynomialCost

Chunking = Literal['fixed', 'dynamic']
CHUNKINGS: tuple[Chunking, ...] = get_args(Chunking)
# Of two sides that are equal but for rounding, neither is the larger.
SLACK = 1e-9


def chunk_stops(
  costs: CostModel | None,
  num_tokens: int,
  prefix_tokens: int,
  chunk_tokens: int,
  chunking: Chunking,
  quantum: int = 1,
) -> tuple[int, ...]:
  """Where the chunks of prompt tokens [prefix_tokens, num_tokens) end.

  Args:
    costs: of chunks; only 'dynamic' asks, 'fixed' takes None too.
    chunk_tokens: size of a 'fixed' chunk and of the largest 'dynamic' one.
    quantum: tokens that 'dynamic' sizes are multiples of. A chunk has at least
      one even where reading its prefix alone takes longer than it should.

  Returns:
    The stops, the last one `num_tokens`, where the ragged chunk ends; none
    where nothing is left to compute.

  Raises:
    ValueError: an unknown chunking, a size below 1, a quantum larger than a
      chunk, or no costs to size 'dynamic' chunks by.
  """
  _check(costs, chunk_tokens, chunking, quantum)
  stops: list[int] = []
  start = prefix_tokens
  while start < num_tokens:
    size = chunk_tokens
    if chunking == 'dynamic':
      assert costs is not None  # _check
      size = dynamic_chunk_tokens(costs, start, chunk_tokens, quantum)
    start = min(start + size, num_tokens)
    stops.append(start)
  return tuple(stops)


def dynamic_chunk_tokens(
  costs: CostModel, prefix_tokens: int, chunk_tokens: int, quantum: int = 1
) -> int:
  """Size of a chunk on a prefix that takes as long as `chunk_tokens` on none.

  The largest multiple of `quantum` that takes no longer; at least one, at
  most what `chunk_tokens` holds of them.
  """
  most = chunk_tokens // quantum
  target_s = costs.prefill_s(chunk_tokens, 0) * (1 + SLACK)
  if isinstance(costs, PolynomialCost):
    tokens = _solve(costs, prefix_tokens, target_s, most * quantum)
    return max(math.floor(tokens / quantum), 1) * quantum
  least = 1
  while least < most:
    middle = (least + most + 1) // 2
    if costs.prefill_s(middle * quantum, prefix_tokens) <= target_s:
      least = middle
    else:
      most = middle - 1
  return least * quantum


def chunk_seconds(
  costs: CostModel, prefix_tokens: int, stops: tuple[int, ...]
) -> tuple[float, ...]:
  """Seconds of each chunk that ends at `stops`, alone on all layers."""
  starts = (prefix_tokens, *stops)
  return tuple(
    costs.prefill_s(stop - start, start) for start, stop in zip(starts, stops)
  )


def _solve(
  costs: PolynomialCost, prefix_tokens: int, seconds: float, most: int
) -> float:
  """The x, at most `most`, with t(prefix_tokens, x) = seconds.

  t(L, x) = c + gamma * L + (b + 2 * a * L) * x + a * x * x, whose root is
  taken in the form that also holds for a = 0.
  """
  if costs.prefill_s(most, prefix_tokens) <= seconds:
    return float(most)
  a = costs.prefill_s_per_token_squared
  slope = costs.prefill_s_per_token + 2 * a * prefix_tokens
  left_s = seconds - costs.prefill_s(0, prefix_tokens)
  if left_s <= 0:
    return 0.0
  divisor = slope + math.sqrt(slope * slope + 4 * a * left_s)
  return min(2 * left_s / divisor, float(most))


def _check(
  costs: CostModel | None,
  chunk_tokens: int,
  chunking: Chunking,
  quantum: int,
) -> None:
  if chunking not in CHUNKINGS:
    raise ValueError(f'{chunking=} must be one of {CHUNKINGS}')
  check_count('chunk_tokens', chunk_tokens)
  check_count('quantum', quantum)
  if chunking == 'dynamic' and costs is None:
    raise ValueError(f'{chunking=} needs costs to size chunks by')
  if chunking == 'dynamic' and quantum > chunk_tokens:
    raise ValueError(f'{quantum=} must be at most {chunk_tokens=}')
