# SPDX-License-Identifier: Apache-2.0
"""How much of a workload could be reused: by whom, how late, in how much room.

All figures are of a store without bounds that is empty at the first prompt, and
of prompts alone: a trace does not say what of an answer is asked about again
before it stands in a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.assess.chains import chains
from mooncake_jax.assess.stack import Hits
from mooncake_jax.assess.stack import leading_tokens
from mooncake_jax.assess.stack import stack_hits
from mooncake_jax.workload.trace import TraceRow

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
PREFIX_TOKENS = (1, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
AGES_S = (1, 10, 60, 300, 600, 1800, 3600)
SHARES = (0.5, 0.8, 0.95)
CURVE_POINTS = 40


@dataclass(frozen=True)
class PrefixShare:
  """Prompts with a reusable prefix of at least `prefix_tokens`.

  Attributes:
    prompts: their share of all prompts.
    tokens: what they reuse, as a share of all prompt tokens.
  """

  prefix_tokens: int
  prompts: float
  tokens: float


@dataclass(frozen=True)
class TenantShare:
  """One tenant's prompts and what of their tokens could be reused."""

  tenant: str
  prompts: int
  prompt_tokens: int
  hit_rate: float


@dataclass(frozen=True)
class WorkingSet:
  """What one block size makes of a workload.

  Attributes:
    unique_tokens: of distinct complete blocks: the room that holds them all.
    hit_rate: the most that could be reused, of all prompt tokens.
  """

  block_size_tokens: int
  unique_tokens: int
  hit_rate: float


@dataclass(frozen=True)
class Reuse:
  """The reuse distribution of a workload; shares are 0-1.

  Attributes:
    block_size_tokens: of all figures but `working_sets`.
    hit_rate: prompt tokens that could be reused, of all.
    hit_prompts: prompts that could reuse a block, of all.
    by_prefix: see `PrefixShare`.
    by_age_s: share of the reusable tokens that were used at most so many
      seconds before.
    by_tenant: the ten with the most prompt tokens.
    working_sets: by block size.
    capacity_tokens: room of an LRU store that gets a share of these hits.
    curve: (room in tokens, hit rate), rising.
  """

  num_prompts: int
  prompt_tokens: int
  block_size_tokens: int
  hit_rate: float
  hit_prompts: float
  by_prefix: tuple[PrefixShare, ...]
  by_age_s: dict[int, float]
  by_tenant: tuple[TenantShare, ...]
  working_sets: tuple[WorkingSet, ...]
  capacity_tokens: dict[float, int]
  curve: tuple[tuple[int, float], ...]


def measure_reuse(
  rows: Sequence[TraceRow],
  tokens_per_hash_id: int,
  block_size_tokens: int,
  block_sizes: Sequence[int] = BLOCK_SIZES,
) -> Reuse | None:
  """Measures rows in order of arrival; None if they don't say what they share.

  Args:
    block_sizes: of `working_sets`; those that the ids can't be cut or joined
      to are left out.

  Raises:
    ValueError: there are no rows, or block_size_tokens is one of those.
  """
  if not rows:
    raise ValueError(f'measure_reuse: {len(rows)=} must be >= 1')
  if not all(row.hashed for row in rows):
    return None
  rows = sorted(rows, key=lambda row: row.timestamp_s)
  found, num_links = chains(rows, tokens_per_hash_id, block_size_tokens)
  hits = list(stack_hits(found, num_links))
  total = sum(row.input_tokens for row in rows)
  reused = np.array([hit.tokens.sum() for hit in hits])
  tokens = np.concatenate([hit.tokens for hit in hits])
  distances = np.concatenate([hit.distance_tokens for hit in hits])
  return Reuse(
    num_prompts=len(rows),
    prompt_tokens=total,
    block_size_tokens=block_size_tokens,
    hit_rate=float(reused.sum() / total),
    hit_prompts=float((reused > 0).mean()),
    by_prefix=_by_prefix(reused, total),
    by_age_s=_by_age(rows, hits),
    by_tenant=_by_tenant(rows, reused),
    working_sets=tuple(
      working_set(rows, tokens_per_hash_id, size)
      for size in block_sizes
      if not max(size, tokens_per_hash_id) % min(size, tokens_per_hash_id)
    ),
    **_capacities(tokens, distances, total),
  )


def working_set(
  rows: Sequence[TraceRow], tokens_per_hash_id: int, block_size_tokens: int
) -> WorkingSet:
  """Distinct blocks and possible hits of rows in order of arrival."""
  found, num_links = chains(rows, tokens_per_hash_id, block_size_tokens)
  covered, reused = np.zeros(num_links, np.int64), 0
  for chain in found:
    reused += int(leading_tokens(chain, covered[chain.links]).sum())
    covered[chain.links] = np.maximum(covered[chain.links], chain.tokens)
  total = sum(row.input_tokens for row in rows)
  return WorkingSet(block_size_tokens, int(covered.sum()), reused / total)


def _by_prefix(reused: np.ndarray, total: int) -> tuple[PrefixShare, ...]:
  return tuple(
    PrefixShare(
      least,
      float((reused >= least).mean()),
      float(reused[reused >= least].sum() / total),
    )
    for least in PREFIX_TOKENS
  )


def _by_age(rows: Sequence[TraceRow], hits: Sequence[Hits]) -> dict[int, float]:
  times_s = np.array([row.timestamp_s for row in rows])
  ages_s = np.concatenate(
    [time_s - times_s[hit.last_used] for time_s, hit in zip(times_s, hits)]
  )
  tokens = np.concatenate([hit.tokens for hit in hits])
  whole = max(int(tokens.sum()), 1)
  return {
    most: float(tokens[ages_s <= most].sum() / whole)
    for most in AGES_S
    if most <= times_s[-1] - times_s[0] or most == AGES_S[0]
  }


def _by_tenant(
  rows: Sequence[TraceRow], reused: np.ndarray
) -> tuple[TenantShare, ...]:
  sums: dict[str, list[int]] = {}
  for row, tokens in zip(rows, reused.tolist()):
    of = sums.setdefault(row.tenant, [0, 0, 0])
    of[0] += 1
    of[1] += row.input_tokens
    of[2] += tokens
  most = sorted(sums.items(), key=lambda item: -item[1][1])[:10]
  return tuple(
    TenantShare(tenant, prompts, tokens, hits / tokens)
    for tenant, (prompts, tokens, hits) in most
  )


def _capacities(
  tokens: np.ndarray, distances: np.ndarray, total: int
) -> dict[str, Any]:
  """Room for shares of the hits, and the whole curve."""
  if not len(tokens):
    return {'capacity_tokens': {}, 'curve': ()}
  order = np.argsort(distances, kind='stable')
  room, got = distances[order], np.cumsum(tokens[order])
  at = np.searchsorted(got, np.array(SHARES) * got[-1])
  points = np.unique(np.linspace(0, len(room) - 1, CURVE_POINTS).astype(int))
  return {
    'capacity_tokens': {s: int(room[i]) for s, i in zip(SHARES, at)},
    'curve': tuple((int(room[i]), float(got[i] / total)) for i in points),
  }
