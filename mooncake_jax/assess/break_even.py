# SPDX-License-Identifier: Apache-2.0
"""From which prefix length on is fetching KVCache faster than recomputing it?

As in FAST'25 section 2.3: with G FLOP/s of compute and B bytes/s of bandwidth a
prefix of p tokens is worth fetching where

  B / G > 2 * d * s / (gqa * (a * p * d + b * d * d)),

d the model's width, s bytes a number, gqa query heads a KV head; a = 4 and
b = 22 for LLaMA3-70B. Beside it stands what the costs say, which have fixed
parts that the formula has not. Differs: b * d * d is counted from the model's
matrices, and d is that of its heads, which is not every model's width.

What recomputing takes is what it adds to a prompt that has more to compute: a
chunk's fixed part is paid either way.

A calibration has one time for a work. P99 is that time by the 99th percentile
of what measured points were of their fit; without points, by log-normal noise.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import math
from statistics import NormalDist

import numpy as np

from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.points import Points
from mooncake_jax.model_config import ModelConfig

PREFIX_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
# Where KVCache may lie, and what brings it to the device that needs it.
MEDIA: dict[str, Link | None] = {
  'HBM': None,
  'DRAM': 'onload',
  'remote DRAM': 'copy',
  'SSD': 'ssd_read',
  'remote store': 'remote_read',
}
ATTENTION = 4  # a of the formula
REST_TOKENS = 512  # of the prompt behind the prefix
_P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True)
class Spread:
  """P99 over the typical time, of prefill and of each link.

  Attributes:
    points: how many measured times it rests on; 0 is assumed noise.
  """

  prefill: float = 1.0
  links: Mapping[Link, float] = field(default_factory=dict)
  points: int = 0


@dataclass(frozen=True)
class Row:
  """One prefix length; seconds at P50 and P99.

  Attributes:
    fetch_s: by medium.
    formula_bytes_per_s: the least bandwidth by the formula above.
    least_bytes_per_s: the least by the costs.
  """

  prefix_tokens: int
  num_bytes: int
  recompute_s: tuple[float, float]
  fetch_s: dict[str, tuple[float, float]]
  formula_bytes_per_s: float
  least_bytes_per_s: float


@dataclass(frozen=True)
class BreakEven:
  """The whole comparison.

  Attributes:
    flops_per_s: G, what an instance reaches on 8,192 tokens.
    tokens: by medium the shortest prefix of `rows` from which on fetching at
      P50 beats recomputing at P50; None where it never does.
    sure_tokens: the same with fetching at P99.
    formula_tokens: by the formula at the link's bandwidth.
  """

  rows: tuple[Row, ...]
  flops_per_s: float
  tokens: dict[str, int | None]
  sure_tokens: dict[str, int | None]
  formula_tokens: dict[str, int]
  spread: Spread


def break_even(
  config: ModelConfig,
  costs: CostModel,
  kv_dtype_bytes: int,
  chunk_tokens: int,
  spread: Spread,
  prefix_tokens: Sequence[int] = PREFIX_TOKENS,
) -> BreakEven:
  """Compares over prefix lengths, those the model takes."""
  lengths = [n for n in prefix_tokens if n <= config.max_tokens]
  at = min(8192, config.max_tokens)
  flops_per_s = config.prefill_flops(0, at) / costs.prompt_s(
    at, 0, chunk_tokens
  )
  rows = []
  for length in lengths:
    num_bytes = kv_bytes(config, length, kv_dtype_bytes)
    recompute_s = _added_s(costs, length, chunk_tokens)
    fetch_s = {
      medium: _fetch_s(costs, num_bytes, link, spread)
      for medium, link in MEDIA.items()
    }
    rows.append(
      Row(
        length,
        num_bytes,
        (recompute_s, recompute_s * spread.prefill),
        fetch_s,
        flops_per_s * formula_bytes_per_flop(config, length, kv_dtype_bytes),
        num_bytes / recompute_s,
      )
    )
  return BreakEven(
    tuple(rows),
    flops_per_s,
    {medium: _first(rows, medium, 0) for medium in MEDIA},
    {medium: _first(rows, medium, 1) for medium in MEDIA},
    {
      medium: _formula_first(config, costs, link, kv_dtype_bytes, flops_per_s)
      for medium, link in MEDIA.items()
    },
    spread,
  )


def formula_bytes_per_flop(
  config: ModelConfig, prefix_tokens: int, dtype_bytes: int
) -> float:
  """Right side of the formula; for p = 1,024 of LLaMA3-70B about 2.8e-6."""
  d = config.num_heads * config.head_dim
  flops = ATTENTION * prefix_tokens * d + 2 * config.num_layer_matmul_params
  return 2 * d * dtype_bytes / (config.num_groups * flops)


def formula_tokens(
  config: ModelConfig, bytes_per_flop: float, dtype_bytes: int
) -> int:
  """The formula solved for p: prefixes longer than so many tokens pay."""
  d = config.num_heads * config.head_dim
  flops = 2 * d * dtype_bytes / (config.num_groups * bytes_per_flop)
  left = flops - 2 * config.num_layer_matmul_params
  return max(0, math.ceil(left / (ATTENTION * d)))


def first_winning(lengths: Sequence[int], wins: Sequence[bool]) -> int | None:
  """The first length from which on all win; None if the longest does not."""
  found = None
  for length, won in zip(reversed(lengths), reversed(wins)):
    if not won:
      break
    found = length
  return found


def spread_of(costs: CostModel, points: Points) -> Spread:
  """What measured times were of the costs that were fitted to them."""
  prefill = [
    seconds / costs.prefill_s(chunk, prefix)
    for chunk, prefix, seconds in points.prefill
  ]
  links: dict[Link, float] = {
    link: _p99([s / costs.transfer_s(n, link) for n, s in points.links[link]])
    for link in LINKS
    if points.links.get(link)
  }
  count = len(prefill) + sum(map(len, points.links.values()))
  return Spread(_p99(prefill), links, count)


def assumed_spread(noise: float) -> Spread:
  """Log-normal noise of this standard deviation on all of them."""
  factor = math.exp(_P99 * noise)
  return Spread(factor, dict.fromkeys(LINKS, factor))


def _p99(ratios: Sequence[float]) -> float:
  return float(np.percentile(ratios, 99)) if ratios else 1.0


def _added_s(costs: CostModel, prefix_tokens: int, chunk_tokens: int) -> float:
  """What a prompt takes more with this prefix computed than with it cached."""
  whole = prefix_tokens + REST_TOKENS
  return costs.prompt_s(whole, 0, chunk_tokens) - costs.prompt_s(
    whole, prefix_tokens, chunk_tokens
  )


def _fetch_s(
  costs: CostModel, num_bytes: int, link: Link | None, spread: Spread
) -> tuple[float, float]:
  if link is None:  # A hit in HBM moves nothing.
    return 0.0, 0.0
  seconds = costs.transfer_s(num_bytes, link)
  return seconds, seconds * spread.links.get(link, 1.0)


def _first(rows: Sequence[Row], medium: str, rank: int) -> int | None:
  """From which length on a fetch at P50 (0) or P99 (1) wins."""
  return first_winning(
    [row.prefix_tokens for row in rows],
    [row.fetch_s[medium][rank] < row.recompute_s[0] for row in rows],
  )


def _formula_first(
  config: ModelConfig,
  costs: CostModel,
  link: Link | None,
  dtype_bytes: int,
  flops_per_s: float,
) -> int:
  """By the formula, at the bandwidth that the link comes to."""
  if link is None:
    return 0
  extra_s = costs.transfer_s(2 << 30, link) - costs.transfer_s(1 << 30, link)
  return formula_tokens(config, (1 << 30) / extra_s / flops_per_s, dtype_bytes)
