# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment: serves, prints, writes the results folder."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
import sys
from typing import Any

from mooncake_jax.metrics.table import comparison
from mooncake_jax.report.environment import environment
from mooncake_jax.report.folder import Results
from mooncake_jax.report.folder import write_results
from scripts.experiment import Experiment
from scripts.progress import progress
from scripts.serving import make_session
from scripts.serving import Outcome
from scripts.serving import serve_session


def run(
  experiment: Experiment, operative: str, out: Path | None
) -> dict[str, Outcome]:
  """Returns the outcome by column of the printed table, 'reuse' first."""
  started = datetime.now().isoformat(timespec='seconds')
  outcomes = {'reuse': _serve(experiment, 'reuse')}
  if experiment.compare_reuse:
    off = replace(experiment.cluster, reuse=False)
    without = replace(experiment, cluster=off, show_answers=0)
    outcomes['no reuse'] = _serve(without, 'no reuse')
  columns = {name: outcome.summary for name, outcome in outcomes.items()}
  print(f'{experiment.title}\n\n{comparison(columns)}\n')
  if out is not None:
    seed = getattr(experiment.workload, 'seed', None)
    found = environment(_devices(experiment), seed, started)
    for name, outcome in outcomes.items():
      folder = out if name == 'reuse' else out / name.replace(' ', '_')
      _write(folder, experiment, operative, found, outcome)
    print(f'results: {out}')
  return outcomes


def _serve(experiment: Experiment, label: str) -> Outcome:
  config = experiment.model.read_config()
  session = make_session(experiment, config)
  for note in session.notes:
    print(note, file=sys.stderr)
  with progress(f'{label:9}', session.total) as on_event:
    outcome = serve_session(experiment, config, session, on_event)
  return outcome


def _devices(experiment: Experiment) -> list[str]:
  if experiment.backend == 'virtual':
    return []
  import jax

  return [str(device) for device in jax.devices()]


def _write(
  folder: Path,
  experiment: Experiment,
  operative: str,
  found: dict[str, Any],
  outcome: Outcome,
) -> None:
  write_results(
    folder,
    Results(
      experiment.title,
      operative,
      found,
      outcome.records,
      outcome.journal,
      outcome.summary,
      experiment.slo,
    ),
  )
