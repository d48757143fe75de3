# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment: serves, prints, writes the results folder."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
import sys
from typing import Any

from mooncake_jax.backend import Backend
from mooncake_jax.metrics.table import comparison
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.report.environment import environment
from mooncake_jax.report.folder import Results
from mooncake_jax.report.folder import write_results
from scripts.experiment import Experiment
from scripts.progress import progress
from scripts.serving import backends
from scripts.serving import Outcome
from scripts.serving import prepare
from scripts.serving import serve_once

WITHOUT = 'no_reuse'
# As `serving.backends`.
Opened = Callable[
  [Experiment, ModelConfig], AbstractContextManager[Callable[[], Backend]]
]


def run(
  experiment: Experiment,
  operative: str,
  out: Path,
  opened: Opened = backends,
  with_page: bool = True,
) -> dict[str, Outcome]:
  """Returns the outcome by column of the printed table, 'reuse' first.

  The results of the run without reuse lie in a folder inside `out`.

  Args:
    opened: gives what it runs on.
    with_page: whether the results have a page to read.
  """
  started = datetime.now().isoformat(timespec='seconds')
  outcomes = _serve_all(experiment, opened)
  _print_answers(next(iter(outcomes.values())), experiment.show_answers)
  columns = {name: outcome.summary for name, outcome in outcomes.items()}
  print(f'\n{experiment.title}\n\n{comparison(columns)}\n')
  for name, outcome in outcomes.items():
    folder = folder_of(out, name)
    found = _environment(experiment, outcome, started)
    _write(folder, experiment, operative, found, outcome, with_page)
  where = f', open {out / "report.html"}' if with_page else ''
  print(f'results: {out}{where}')
  return outcomes


def folder_of(out: Path, name: str) -> Path:
  """Where the results of one column of the table lie."""
  return out / WITHOUT if name == WITHOUT else out


def _serve_all(experiment: Experiment, opened: Opened) -> dict[str, Outcome]:
  config = experiment.model.read_config()
  name = 'reuse' if experiment.cluster.reuse else WITHOUT
  with opened(experiment, config) as make_backend:
    outcomes = {name: _serve(experiment, config, name, make_backend)}
    if experiment.compare_reuse and experiment.cluster.reuse:
      off = replace(experiment.cluster, reuse=False)
      without = replace(experiment, cluster=off)
      outcomes[WITHOUT] = _serve(without, config, WITHOUT, make_backend)
  return outcomes


def _serve(
  experiment: Experiment,
  config: ModelConfig,
  label: str,
  make_backend: Callable[[], Backend],
) -> Outcome:
  prepared = prepare(experiment, config)
  with progress(f'{label:9}', prepared.total) as on_event:
    backend = make_backend()
    outcome = serve_once(experiment, config, prepared, backend, on_event)
  for error in prepared.errors:
    print(f'left out: {error}', file=sys.stderr)
  return outcome


def _print_answers(outcome: Outcome, count: int) -> None:
  tell = outcome.prepared.tell
  if tell is not None:
    for record in outcome.records[:count]:
      print(f'\n{tell(record)}')


def _environment(
  experiment: Experiment, outcome: Outcome, started: str
) -> dict[str, Any]:
  """Where it ran, and which requests could not be made."""
  devices = []
  if experiment.backend == 'device':
    import jax

    devices = [str(device) for device in jax.devices()]
  seed = getattr(experiment.workload, 'seed', None)
  left_out = list(outcome.prepared.errors)
  return environment(devices, seed, started) | {'left_out': left_out}


def _write(
  folder: Path,
  experiment: Experiment,
  operative: str,
  found: dict[str, Any],
  outcome: Outcome,
  with_page: bool,
) -> None:
  results = Results(
    experiment.title,
    operative,
    found,
    outcome.records,
    outcome.journal,
    outcome.summary,
    experiment.slo,
  )
  write_results(folder, results, with_page)
