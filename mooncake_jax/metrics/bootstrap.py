# SPDX-License-Identifier: Apache-2.0
"""How sure a difference of two runs is: bootstrap intervals of their figures.

Requests that follow each other share queues and caches, so they are drawn in
blocks of neighbours, about as long as the square root of their number
(Kuensch, 1989): one by one they would look surer than they are. Where a run was
repeated with other seeds, seeds are drawn first and blocks within each. Runs of
the same requests are drawn alike, so that what is alike in both cancels.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
import math

import numpy as np

from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.summary import is_effective
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO

# Columns of a run: by name, a number a request, NaN where it has none.
Columns = Mapping[str, np.ndarray]
Statistic = Callable[[Columns], float]


@dataclass(frozen=True)
class Difference:
  """A figure of two runs.

  Attributes:
    first, other: what it is in each.
    low, high: interval of other - first.
  """

  first: float
  other: float
  low: float
  high: float

  @property
  def is_sure(self) -> bool:
    """Whether the interval leaves out 0."""
    return self.low > 0 or self.high < 0


def columns(records: Sequence[RequestRecord], slo: SLO) -> Columns:
  """What figures are made of, in order of arrival."""
  ordered = sorted(records, key=lambda r: (r.arrival_s, r.request_id))
  done = [r.outcome == 'completed' for r in ordered]
  known = [r.prefill_done_s is not None and r.reuse_known for r in ordered]
  nan = float('nan')
  return {
    'ttft_s': _numbers(r.ttft_s if d else nan for r, d in zip(ordered, done)),
    'tbt_tail_s': _numbers(
      tbt_tail_s(r) if d else nan for r, d in zip(ordered, done)
    ),
    'effective': _numbers(is_effective(r, slo) for r in ordered),
    'prompt_tokens': _numbers(
      r.prompt_tokens if k else nan for r, k in zip(ordered, known)
    ),
    'reused_tokens': _numbers(
      sum(r.reused_tokens.values()) if k else nan
      for r, k in zip(ordered, known)
    ),
  }


def _numbers(values) -> np.ndarray:
  return np.array([math.nan if v is None else v for v in values], float)


def _percentile(name: str, rank: float) -> Statistic:
  def statistic(of: Columns) -> float:
    known = of[name][~np.isnan(of[name])]
    return float(np.percentile(known, rank)) if len(known) else math.nan

  return statistic


def _mean(name: str) -> Statistic:
  def statistic(of: Columns) -> float:
    known = of[name][~np.isnan(of[name])]
    return float(known.mean()) if len(known) else math.nan

  return statistic


def _hit_rate(of: Columns) -> float:
  total = np.nansum(of['prompt_tokens'])
  return float(np.nansum(of['reused_tokens']) / total) if total else math.nan


FIGURES: dict[str, Statistic] = {
  'effective_request_capacity': _mean('effective'),
  'ttft_s.mean': _mean('ttft_s'),
  'ttft_s.p50': _percentile('ttft_s', 50),
  'ttft_s.p90': _percentile('ttft_s', 90),
  'tbt_tail_s.mean': _mean('tbt_tail_s'),
  'tbt_tail_s.p90': _percentile('tbt_tail_s', 90),
  'hit_rate': _hit_rate,
}


def differences(
  first: Sequence[Columns],
  other: Sequence[Columns],
  draws: int = 500,
  level: float = 0.95,
  seed: int = 0,
) -> dict[str, Difference]:
  """All figures of two systems, each run once or once a seed.

  Args:
    first, other: the runs of each, paired by seed where they are as many.
    draws: of the bootstrap.
    level: of the intervals.

  Raises:
    ValueError: a system without runs or a run without requests.
  """
  for runs in (first, other):
    if not runs or not all(len(run['effective']) for run in runs):
      raise ValueError('differences: a run without requests')
  rng = np.random.default_rng(seed)
  found: dict[str, list[float]] = {name: [] for name in FIGURES}
  for _ in range(draws):
    a, b = _drawn(first, other, rng)
    for name, statistic in FIGURES.items():
      found[name].append(statistic(b) - statistic(a))
  whole_a, whole_b = _joined(first), _joined(other)
  ranks = 50 * (1 - level), 50 * (1 + level)
  return {
    name: Difference(
      statistic(whole_a),
      statistic(whole_b),
      *map(float, np.nanpercentile(found[name], ranks)),
    )
    for name, statistic in FIGURES.items()
    if not math.isnan(statistic(whole_a)) and not math.isnan(statistic(whole_b))
  }


def _drawn(
  first: Sequence[Columns], other: Sequence[Columns], rng: np.random.Generator
) -> tuple[Columns, Columns]:
  """Both systems once more, of seeds and blocks with repetition."""
  picks = rng.integers(len(first), size=len(first))
  others = picks
  if len(first) != len(other):
    others = rng.integers(len(other), size=len(other))
  drawn_a, drawn_b = [], []
  for a, b in zip(picks, others):
    at = _blocks(len(first[a]['effective']), rng)
    drawn_a.append(_taken(first[a], at))
    same = len(first[a]['effective']) == len(other[b]['effective'])
    at = at if same else _blocks(len(other[b]['effective']), rng)
    drawn_b.append(_taken(other[b], at))
  drawn_b += [
    _taken(other[b], _blocks(len(other[b]['effective']), rng))
    for b in others[len(picks) :]
  ]
  drawn_a += [
    _taken(first[a], _blocks(len(first[a]['effective']), rng))
    for a in picks[len(others) :]
  ]
  return _joined(drawn_a), _joined(drawn_b)


def _blocks(count: int, rng: np.random.Generator) -> np.ndarray:
  """Indices of `count` requests, in runs of neighbours; the end meets the
  begin."""
  length = max(1, math.isqrt(count))
  starts = rng.integers(count, size=-(-count // length))
  return ((starts[:, None] + np.arange(length)) % count).ravel()[:count]


def _taken(of: Columns, at: np.ndarray) -> Columns:
  return {name: column[at] for name, column in of.items()}


def _joined(runs: Sequence[Columns]) -> Columns:
  return {name: np.concatenate([r[name] for r in runs]) for name in runs[0]}
