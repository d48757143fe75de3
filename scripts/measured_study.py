# SPDX-License-Identifier: Apache-2.0
"""What notebooks/simulated_vs_measured.ipynb computes and draws.

Takes comparisons of a run on devices with simulations of it
(`scripts/replay.py`); gives tables and figures.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.perturbed import PerturbedCost
from mooncake_jax.report.lines import line_panels
from mooncake_jax.report.listing import Listing
from mooncake_jax.request import RequestRecord
from scripts.replay import Comparison
from scripts.replay import Folder
from scripts.replay import tbts_s
from scripts.replay import ttfts_s

# Where a request's time goes: the stamps of a record between which each lies.
PARTS = {
  'queued, prefix read': ('arrival_s', 'prefill_start_s'),
  'prefill': ('prefill_start_s', 'first_token_s'),
  'decode': ('first_token_s', 'finished_s'),
}
TTFTS = ('TTFT P50', 'TTFT P90', 'TTFT P99')
SHARES = np.linspace(0, 1, 41)


def if_off_by(
  folder: Folder, costs: CostModel, factors: Sequence[float]
) -> Listing:
  """How far off TTFT comes out if chunks are said to take so many times."""
  rows = []
  for factor in factors:
    off = PerturbedCost(costs, prefill_bias=factor)
    found = folder.compare(off).quantiles()
    rows.append((f'x {factor}', *(_error(*found[name]) for name in TTFTS)))
  return Listing(('chunks take', *TTFTS), rows)


def _error(measured_s: float, simulated_s: float) -> str:
  return f'{simulated_s / measured_s - 1:+.0%}'


def distributions(comparisons: Mapping[str, Comparison]) -> Any:
  """Share of requests, and of gaps between tokens, that took at most so long.

  The measured run is drawn once: all comparisons are with the same.
  """
  first = next(iter(comparisons.values()))
  runs = {'measured': first.measured}
  runs |= {name: each.simulated for name, each in comparisons.items()}
  panels = {
    title: {name: _steps(take(records)) for name, records in runs.items()}
    for title, take in (('TTFT', ttfts_s), ('TBT', tbts_s))
  }
  return line_panels(panels, 'seconds', 'share that took at most so long', 2)


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
  return [*zip(np.quantile(values, SHARES).tolist(), SHARES.tolist())]


def by_request(comparison: Comparison) -> Any:
  """Simulated over measured seconds to first token, a point a request."""
  from matplotlib.figure import Figure  # 0.3 s: paid by who plots

  measured, simulated = map(
    ttfts_s, (comparison.measured, comparison.simulated)
  )
  figure = Figure((4.5, 4.5), layout='constrained')
  axes = figure.subplots()
  top = max(*measured, *simulated) * 1.05
  axes.plot([0, top], [0, top], color='0.6', label='simulated = measured')
  axes.plot(measured, simulated, 'o', markersize=3, alpha=0.7)
  axes.set(xlabel='TTFT measured, s', ylabel='TTFT simulated, s')
  axes.set(xlim=(0, top), ylim=(0, top), aspect='equal')
  axes.grid(alpha=0.3)
  axes.legend(fontsize=7)
  return figure


def parts(comparison: Comparison) -> Listing:
  """Mean seconds of a request in each part of its life."""
  sides = comparison.measured, comparison.simulated
  rows = [
    (name, *(_mean_s(records, *stamps) for records in sides))
    for name, stamps in PARTS.items()
  ]
  return Listing(('', 'measured', 'simulated'), rows)


def _mean_s(records: Sequence[RequestRecord], start: str, stop: str) -> float:
  return fmean(getattr(r, stop) - getattr(r, start) for r in records)
