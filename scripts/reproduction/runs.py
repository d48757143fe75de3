# SPDX-License-Identifier: Apache-2.0
"""Runs of an experiment's sweep file, each once: its figures are kept.

A run's folder bears the hash of its operative config, so that experiments
which ask for the same run share it, and what was interrupted goes on.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
import sys
import time
from typing import Any

from scripts.config import load
from scripts.experiment import Experiment
from scripts.reproduction.measures import measure
from scripts.reproduction.replicas import Replicas
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_once
from scripts.sweeps import point as points
from scripts.sweeps.grid import points as make_points
from scripts.sweeps.grid import Sweep

FOLDER = 'configs/reproduce'
QUICK_REQUESTS = 60


@dataclass(frozen=True)
class Found:
  """One run: the values of its sweep's axes, and what it gave."""

  values: Mapping[str, Any]
  figures: Mapping[str, Any]


@dataclass(frozen=True)
class Runs:
  """Gives the runs of sweep files.

  Attributes:
    out: folder of what is kept.
    quick: the first requests of a trace only, to try that all works.
    again: also what is kept is run anew.
  """

  out: Path
  quick: bool = False
  again: bool = False

  def sweep(self, name: str, bind: Sequence[str] = ()) -> list[Found]:
    """All points of `configs/reproduce/NAME.gin`, with more bindings."""
    sweep, _ = load(f'{FOLDER}/{name}.gin', (), Sweep)
    quick = (f'TraceScale.num_requests={QUICK_REQUESTS}',)
    added = (*sweep.bind, *bind, *(quick if self.quick else ()))
    return [
      Found(point.values, self._figures(sweep.run, point))
      for point in make_points(replace(sweep, bind=added))
    ]

  def keep(self, name: str, make: Any) -> dict[str, Any]:
    """Figures that no simulation gives: made once, kept under a name."""
    folder = self.out / (f'{name}_quick' if self.quick else name)
    found = None if self.again else points.read(folder)
    if found is None:
      found = {'status': 'done', 'figures': make()}
      points.write(folder, found)
    return found['figures']

  def _figures(self, run: str, point: Any) -> dict[str, Any]:
    if point.reason:
      raise ValueError(point.reason)
    folder = self.out / point.name
    found = None if self.again else points.read(folder)
    if found is None:
      print(f'{run} {dict(point.values)} ...', end='', file=sys.stderr)
      sys.stderr.flush()
      began_s = time.process_time()
      figures = _run(run, point.bindings)
      seconds = time.process_time() - began_s
      print(f' {seconds:.1f} s', file=sys.stderr)
      found = {'status': 'done', 'figures': figures, 'cpu_s': seconds}
      points.write(folder, found)
    return found['figures']


def _run(run: str, bindings: Sequence[str]) -> dict[str, Any]:
  experiment, _ = load(run, bindings, Experiment)
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  with backends(experiment, config) as make_backend:
    replicas = Replicas(prepared.requests)
    outcome = serve_once(
      experiment, config, prepared, make_backend(), replicas.hear
    )
  return measure(outcome, replicas)
