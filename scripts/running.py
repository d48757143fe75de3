# SPDX-License-Identifier: Apache-2.0
"""Runs an experiment: serves, prints, writes the results folder."""

from collections.abc import Callable
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextlib import closing
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
import sys
from typing import Any

from mooncake_jax.metrics.table import comparison
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.report.environment import environment
from mooncake_jax.report.folder import Results
from mooncake_jax.report.folder import write_results
from mooncake_jax.report.unfinished import Unfinished
from scripts import resuming
from scripts.compare import OPERATIVE
from scripts.experiment import Experiment
from scripts.progress import progress
from scripts.serving import backends
from scripts.serving import MakeBackend
from scripts.serving import Outcome
from scripts.serving import prepare
from scripts.serving import serve_once

WITHOUT = 'no_reuse'
# As `serving.backends`.
Opened = Callable[
  [Experiment, ModelConfig], AbstractContextManager[MakeBackend]
]


def run(
  experiment: Experiment,
  operative: str,
  out: Path,
  opened: Opened = backends,
  with_page: bool = True,
  resumes: bool = False,
) -> dict[str, Outcome]:
  """Returns the outcome by column of the printed table, 'reuse' first.

  The results of the run without reuse lie in a folder inside `out`.

  Args:
    opened: gives what it runs on.
    with_page: whether the results have a page to read.
    resumes: goes on with what an earlier run has left in `out`, see
      `scripts/resuming.py`.
  """
  started = datetime.now().isoformat(timespec='seconds')
  about = resuming.about(started)
  with ExitStack() as stack:
    kept = {
      name: stack.enter_context(
        closing(Unfinished(folder_of(out, name), resumes, about))
      )
      for name in _columns(experiment)
    }
    (out / OPERATIVE).write_text(operative)
    outcomes = _serve_all(experiment, opened, kept)
  _print_answers(next(iter(outcomes.values())), experiment.show_answers)
  columns = {name: outcome.summary for name, outcome in outcomes.items()}
  print(f'\n{experiment.title}\n\n{comparison(columns)}\n')
  for name, outcome in outcomes.items():
    folder = folder_of(out, name)
    found = _environment(experiment, outcome, started, kept[name].parts)
    _write(folder, experiment, operative, found, outcome, with_page)
    kept[name].finish()
  where = f', open {out / "report.html"}' if with_page else ''
  print(f'results: {out}{where}')
  return outcomes


def folder_of(out: Path, name: str) -> Path:
  """Where the results of one column of the table lie."""
  return out / WITHOUT if name == WITHOUT else out


def _columns(experiment: Experiment) -> dict[str, Experiment]:
  """What is served, by column."""
  cluster = experiment.cluster
  columns = {'reuse' if cluster.reuse else WITHOUT: experiment}
  if experiment.compare_reuse and cluster.reuse:
    columns[WITHOUT] = replace(
      experiment, cluster=replace(cluster, reuse=False)
    )
  return columns


def _serve_all(
  experiment: Experiment, opened: Opened, kept: Mapping[str, Unfinished]
) -> dict[str, Outcome]:
  config = experiment.model.read_config()
  with opened(experiment, config) as make_backend:
    return {
      name: _serve(each, config, name, make_backend, kept[name])
      for name, each in _columns(experiment).items()
    }


def _serve(
  experiment: Experiment,
  config: ModelConfig,
  label: str,
  make_backend: MakeBackend,
  kept: Unfinished,
) -> Outcome:
  prepared = prepare(experiment, config)
  done, is_simulated = len(kept.records), experiment.backend == 'virtual'
  if done:
    print(f'{label}: {done} requests kept, goes on at {kept.at_s:.1f} s')
  with progress(f'{label:9}', prepared.total, done) as on_event:
    outcome = serve_once(
      experiment,
      config,
      prepared,
      make_backend(kept.at_s),
      on_event,
      None if is_simulated else kept,
    )
  for error in prepared.errors:
    print(f'left out: {error}', file=sys.stderr)
  return outcome


def _print_answers(outcome: Outcome, count: int) -> None:
  tell = outcome.prepared.tell
  if tell is not None:
    for record in outcome.records[:count]:
      print(f'\n{tell(record)}')


def _environment(
  experiment: Experiment,
  outcome: Outcome,
  started: str,
  parts: list[dict[str, Any]],
) -> dict[str, Any]:
  """Where it ran, in which parts, and which requests could not be made."""
  processes = 1
  if experiment.backend == 'device':
    import jax

    processes = jax.process_count()
  devices = [device.name for device in outcome.devices]
  platforms = sorted({device.platform for device in outcome.devices})
  seed = getattr(experiment.workload, 'seed', None)
  left_out = list(outcome.prepared.errors)
  return environment(devices, seed, started) | {
    'jax_backend': ', '.join(platforms) or None,
    'attention': sorted({device.attention for device in outcome.devices}),
    'matmul_precision': sorted(
      {device.matmul_precision or 'default' for device in outcome.devices}
    ),
    'processes': processes,
    'left_out': left_out,
    'parts': parts,
    'resumed': len(parts) > 1,
  }


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
