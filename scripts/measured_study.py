# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of `notebooks/simulated_vs_measured.ipynb`."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
import numpy as np

from mooncake_jax.costs.model import CostModel
from mooncake_jax.report.records import read_journal
from mooncake_jax.report.records import read_records
from scripts.calibrate import calibrate_served
from scripts.config import load
from scripts.experiment import Experiment
from scripts.replay import compare
from scripts.replay import Comparison
from scripts.replay import tbts_s
from scripts.replay import ttfts_s
from scripts.running import run


def served(run_file: str, seed: int, out: Path) -> Experiment:
  """Serves the run's workload of a seed on devices; results lie in `out`."""
  bind = [f'conversation.seed={seed}']
  experiment, operative = load(run_file, bind, Experiment)
  run(experiment, operative, out, with_page=False)
  return experiment


def costs_of(experiment: Experiment, results: Path) -> CostModel:
  """Costs of chunks and steps as that run had them."""
  fits = calibrate_served(experiment, results)
  found = {k: v for fit in fits.values() for k, v in fit.coefficients.items()}
  return type(experiment.costs)(**found)


def held_against(
  experiment: Experiment, results: Path, costs: CostModel
) -> Comparison:
  """The run's records beside those of its simulation."""
  return compare(
    experiment,
    read_records(results / 'records.jsonl'),
    read_journal(results / 'events.jsonl'),
    costs,
  )


def distributions(comparisons: Mapping[str, Comparison]) -> Figure:
  """Shares of requests and of intervals below a time, by whose costs."""
  figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
  for axis, (name, take) in zip(
    axes, (('TTFT', ttfts_s), ('TBT', tbts_s)), strict=True
  ):
    first = next(iter(comparisons.values()))
    _ecdf(axis, take(first.measured), 'measured', 'black')
    for label, comparison in comparisons.items():
      _ecdf(axis, take(comparison.simulated), label)
    axis.set(xscale='log', xlabel=f'{name} [s]', ylim=(0, 1))
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('share below')
  axes[1].legend(loc='lower right')
  figure.tight_layout()
  plt.close(figure)
  return figure


def _ecdf(axis, values_s, label: str, color: str | None = None) -> None:
  ordered = np.sort(values_s)
  shares = np.arange(1, len(ordered) + 1) / len(ordered)
  axis.plot(ordered, shares, label=label, color=color)
