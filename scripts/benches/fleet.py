# SPDX-License-Identifier: Apache-2.0
"""What a fleet of processes costs the one driver: simulated instances on Ray.

Conversations on the paper's nodes at the pace of the clock, an instance a
process (`RaySpec.simulated`), beside the same in one process. Of 200 instances
as many as fit the memory that is there; MOONCAKE_JAX_FLEET says another number.
"""

from collections.abc import Iterator
from dataclasses import replace
import os
from pathlib import Path
import time
from typing import Any
from typing import NamedTuple

from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.sim.paced import PacedBackend
from scripts.benches.rows import Row
from scripts.config import load
from scripts.experiment import Experiment
from scripts.ray_cluster import ray_backend
from scripts.serving import backends
from scripts.serving import Outcome
from scripts.serving import prepare
from scripts.serving import serve_once

RUN = 'configs/run/sim_conversation.gin'
FLEET = 'MOONCAKE_JAX_FLEET'
WHOLE, QUICK = 200, 16
REQUESTS_PER_S = 8.0
TRACE_PER_S = 3.5  # of the generated conversations
SECONDS = 30.0
IDLE_S = 5.0
GATHER_S = 0.1
# Of one process, its share of what all read counted once; with room to spare.
PROCESS_BYTES = 80 << 20
# Ray starts so many at once.
STARTING = 4


class Used(NamedTuple):
  """Of the driver's processor, and of the clock."""

  cpu_s: float
  wall_s: float


def fleet(quick: bool) -> Iterator[Row]:
  """Instances, what they and the driver take, and how late they are."""
  wanted = int(os.environ.get(FLEET) or (QUICK if quick else WHOLE))
  count = min(wanted, _fitting())
  experiment, config = _experiment(count)
  alone, alone_used = _in_one_process(experiment, config)
  spec = RaySpec(
    wire=WireSpec('tcp'),
    num_cpus=STARTING / count,
    silence_s=60.0,
    simulated=True,
  )
  apart = replace(experiment, backend='ray', ray=spec)
  begun_s = time.perf_counter()
  with ray_backend(apart, config) as backend:
    start_s = time.perf_counter() - begun_s
    idle = _use(lambda: backend.wait(backend.now_s() + IDLE_S))
    workers = [*backend.crew.process_ids.values()]
    before_s = _cpu_s(workers)
    outcomes: list[Outcome] = []
    backend.restart_clock()
    used = _use(lambda: outcomes.append(_serve(apart, config, backend)))
    worker_cpu_s = _cpu_s(workers) - before_s
    backend.crew.gather_s = GATHER_S
    backend.restart_clock()
    fewer = _use(lambda: outcomes.append(_serve(apart, config, backend)))
    worker_bytes = sum(map(_share_bytes, workers)) / count
  yield Row('fleet.instances', count, '', f'of {wanted}, each a process')
  yield Row('fleet.start', start_s, 's', 'of all, until they are listened to')
  yield Row('fleet.process_memory', worker_bytes / 2**20, 'MiB', 'PSS, mean')
  share = idle.cpu_s / idle.wall_s
  yield Row('fleet.idle_driver', share, 'cores', 'that listens to all')
  cores = worker_cpu_s / used.wall_s
  yield Row('fleet.workers', cores, 'cores', 'of all workers, serving')
  yield from _requests(outcomes[0], used, alone, alone_used)
  gathered_s = fewer.cpu_s / len(outcomes[1].records)
  about = f'with RaySpec.gather_s = {GATHER_S:g}'
  yield Row('fleet.driver_s_per_request_gathered', gathered_s, 's', about)


def _requests(
  apart: Outcome, used: Used, alone: Outcome, alone_used: Used
) -> Iterator[Row]:
  """What a request costs the driver, and what it waits."""
  count = len(apart.records)
  done = sum(r.outcome == 'completed' for r in apart.records)
  yield Row('fleet.completed', done / count, 'ratio', f'of {count}', 1.0)
  cost_s, alone_s = (u.cpu_s / count for u in (used, alone_used))
  about = f'{used.cpu_s / used.wall_s:.2f} of a core at {REQUESTS_PER_S:g}/s'
  yield Row('fleet.driver_s_per_request', cost_s, 's', about)
  about = f'{alone_s:.3g} s with all instances simulated in the driver'
  yield Row('fleet.driver_over_one_process', cost_s / alone_s, 'ratio', about)
  late_s = [_mean_ttft_s(each) for each in (apart, alone)]
  about = f'mean TTFT; {late_s[1]:.3g} s in one process'
  yield Row('fleet.ttft_more', late_s[0] - late_s[1], 's', about)


def _experiment(count: int) -> tuple[Experiment, ModelConfig]:
  num_requests = round(REQUESTS_PER_S * SECONDS)
  experiment, _ = load(
    RUN,
    [
      f'ClusterSpec.prefill_instances={count // 2}',
      f'ClusterSpec.decode_instances={count - count // 2}',
      f'conversation.num_requests={num_requests}',
      f'TraceScale.time_scale={REQUESTS_PER_S / TRACE_PER_S}',
    ],
    Experiment,
  )
  return experiment, experiment.model.read_config()


def _in_one_process(
  experiment: Experiment, config: ModelConfig
) -> tuple[Outcome, Used]:
  outcomes: list[Outcome] = []
  with backends(experiment, config, PacedBackend) as make:
    used = _use(lambda: outcomes.append(_serve(experiment, config, make())))
  return outcomes[0], used


def _serve(
  experiment: Experiment, config: ModelConfig, backend: Any
) -> Outcome:
  prepared = prepare(experiment, config)
  without = replace(experiment, keeps_journal=False)
  return serve_once(without, config, prepared, backend)


def _use(work: Any) -> Used:
  cpu_s, wall_s = time.process_time(), time.perf_counter()
  work()
  return Used(time.process_time() - cpu_s, time.perf_counter() - wall_s)


def _mean_ttft_s(outcome: Outcome) -> float:
  found = [r.ttft_s for r in outcome.records if r.ttft_s is not None]
  return sum(found) / len(found)


def _fitting() -> int:
  """How many processes the memory that is there holds."""
  text = Path('/proc/meminfo').read_text()
  free_bytes = int(text.split('MemAvailable:')[1].split()[0]) * 1024
  return max(2, int(0.8 * free_bytes / PROCESS_BYTES))


def _share_bytes(process: int) -> int:
  """Memory of a process, what it shares with others divided among them."""
  text = Path(f'/proc/{process}/smaps_rollup').read_text()
  return int(text.split('\nPss:')[1].split()[0]) * 1024


def _cpu_s(processes: list[int]) -> float:
  """Processor seconds of them all so far."""
  ticks = 0
  for process in processes:
    fields = Path(f'/proc/{process}/stat').read_text().rpartition(')')[2]
    ticks += sum(map(int, fields.split()[11:13]))
  return ticks / os.sysconf('SC_CLK_TCK')
