# SPDX-License-Identifier: Apache-2.0
"""One simulation, timed in a process of its own, without jax.

  python -m scripts.benches.sim_case RUN.gin BINDING...

Prints a line of JSON: requests, how many completed, seconds of the serve loop
by the processor's clock and by the wall's, what of the latter the Conductor
took, simulated seconds, and the process's peak memory.
"""

import json
from pathlib import Path
import sys
import time
from typing import Any

from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.events import Event
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.serve import serve
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import cluster_of
from scripts.serving import conductor_of
from scripts.serving import prepare
from scripts.serving import rare_collections


class TimedConductor(Conductor):
  """Counts the seconds that it takes itself, by the wall's clock."""

  spent_s = 0.0

  def place(
    self,
    request: Request,
    now_s: float,
    attempt: int = 0,
    avoid: frozenset[str] = frozenset(),
  ) -> Placement | Rejection:
    start_s = time.perf_counter()
    decision = super().place(request, now_s, attempt, avoid)
    self.spent_s += time.perf_counter() - start_s
    return decision

  def observe(self, event: Event) -> None:
    start_s = time.perf_counter()
    super().observe(event)
    self.spent_s += time.perf_counter() - start_s


def peak_bytes() -> int:
  """Of this process; `getrusage` would count its parent before the exec."""
  status = Path('/proc/self/status').read_text()
  return int(status.split('VmHWM:')[1].split()[0]) * 1024


def main(run: str, bindings: list[str]) -> dict[str, Any]:
  """Serves the run's workload; only the loop is timed."""
  experiment, _ = load(run, bindings, Experiment)
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  with backends(experiment, config) as make_backend:
    conductor = conductor_of(experiment, config, TimedConductor)
    assert isinstance(conductor, TimedConductor)
    cluster = cluster_of(experiment, config, make_backend(), conductor)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    with rare_collections():
      records, _ = serve(
        prepared.requests, conductor, cluster, keeps_journal=False
      )
    cpu_s = time.process_time() - cpu_s
    wall_s = time.perf_counter() - wall_s
  return {
    'requests': len(records),
    'completed': sum(record.outcome == 'completed' for record in records),
    'cpu_s': cpu_s,
    'wall_s': wall_s,
    'conductor_s': conductor.spent_s,
    'peak_bytes': peak_bytes(),
    'duration_s': max(record.finished_s or 0.0 for record in records),
  }


if __name__ == '__main__':
  print(json.dumps(main(sys.argv[1], sys.argv[2:])))
