# SPDX-License-Identifier: Apache-2.0
"""Runs of an experiment's sweep file, each once: its figures are kept.

A run's folder bears the hash of its operative config, so that experiments
which ask for the same run share it, and what was interrupted goes on.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
import multiprocessing
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
from scripts.sweeps.grid import Point
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
    again: also what is kept is run anew, once.
    workers: runs at a time.
  """

  out: Path
  quick: bool = False
  again: bool = False
  workers: int = 1
  _anew: set[str] = field(default_factory=set)

  def sweep(self, name: str, bind: Sequence[str] = ()) -> list[Found]:
    """All points of `configs/reproduce/NAME.gin`, with more bindings.

    Raises:
      ValueError: one that cannot be built.
    """
    sweep, _ = load(f'{FOLDER}/{name}.gin', (), Sweep)
    quick = (f'TraceScale.num_requests={QUICK_REQUESTS}',)
    added = (*sweep.bind, *bind, *(quick if self.quick else ()))
    made = make_points(replace(sweep, bind=added))
    for reason in filter(None, (point.reason for point in made)):
      raise ValueError(reason)
    todo = {p.name: p for p in made if self._kept(p.name) is None}
    self._run_all(sweep.run, [*todo.values()])
    return [Found(p.values, self._figures(p.name)) for p in made]

  def keep(
    self, name: str, make: Callable[[], dict[str, Any]]
  ) -> dict[str, Any]:
    """Figures that no simulation gives: made once, kept under a name."""
    name = f'{name}_quick' if self.quick else name
    if self._kept(name) is None:
      points.write(self.out / name, {'status': 'done', 'figures': make()})
      self._anew.add(name)
    return self._figures(name)

  def _kept(self, name: str) -> dict[str, Any] | None:
    if self.again and name not in self._anew:
      return None
    return points.read(self.out / name)

  def _figures(self, name: str) -> dict[str, Any]:
    found = points.read(self.out / name)
    assert found is not None, name
    return found['figures']

  def _run_all(self, run: str, todo: Sequence[Point]) -> None:
    one = partial(_run_point, run, self.out)
    if self.workers == 1 or len(todo) < 2:
      for point in todo:
        one(point)
    else:
      context = multiprocessing.get_context('spawn')
      with ProcessPoolExecutor(self.workers, context) as pool:
        list(pool.map(one, todo))
    self._anew.update(point.name for point in todo)


def _run_point(run: str, out: Path, point: Point) -> None:
  """Runs a point and leaves its figures in its folder."""
  began_s = time.process_time()
  figures = _run(run, point.bindings)
  seconds = time.process_time() - began_s
  found = {'status': 'done', 'figures': figures, 'cpu_s': seconds}
  points.write(out / point.name, found)
  print(f'{run} {dict(point.values)}: {seconds:.1f} s', file=sys.stderr)


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
