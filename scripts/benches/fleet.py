# SPDX-License-Identifier: Apache-2.0
"""What a fleet of processes costs the one driver: simulated instances on Ray.

Conversations on the paper's nodes at the pace of the clock, instances in
processes (`RaySpec.simulated`), beside the same in one process: as many of 200
as the memory that is there holds with a process each, and all 200, of which
some share one. MOONCAKE_JAX_FLEET says other sizes, as in '100/1 200/8':
instances, and how many a process; '16/1/0' also has RaySpec.gather_s.
"""

from collections.abc import Iterator
from collections.abc import Sequence
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
WHOLE = 200
TRACE_PER_S = 3.5  # of the generated conversations
SECONDS = 15.0
IDLE_S = 5.0
# Of one process, its share of what all read counted once; with room to spare.
PROCESS_BYTES = 80 << 20
# Ray starts so many at once.
STARTING = 4


class Size(NamedTuple):
  """A fleet: instances, how many of them a process, `RaySpec.gather_s`."""

  instances: int
  per_process: int
  gather_s: float | None = None

  @property
  def name(self) -> str:
    """Of its rows."""
    gathered = '' if self.gather_s is None else f'/{self.gather_s:g}'
    return f'fleet.{self.instances}/{self.per_process}{gathered}'

  @property
  def num_processes(self) -> int:
    return -(-self.instances // self.per_process)

  @property
  def rates_per_s(self) -> tuple[float, ...]:
    """Requests; the first of them is too much for 16 instances."""
    return (8.0,) if self.instances < 100 else (8.0, 24.0)


class Used(NamedTuple):
  """Of processors, and of the clock; `others` are the workers."""

  cpu_s: float
  wall_s: float
  others_s: float = 0.0


class Run(NamedTuple):
  """What was served, and what that took."""

  outcome: Outcome
  used: Used

  @property
  def cost_s(self) -> float:
    """The driver's processor seconds a request."""
    return self.used.cpu_s / len(self.outcome.records)

  @property
  def ttft_s(self) -> float:
    """The mean."""
    found = [r.ttft_s for r in self.outcome.records if r.ttft_s is not None]
    return sum(found) / len(found)


def fleet(quick: bool) -> Iterator[Row]:
  """Instances, what they and the driver take, and how late they are."""
  for size in _sizes(quick):
    yield from _rows_of(size)


def _sizes(quick: bool) -> list[Size]:
  if words := os.environ.get(FLEET):
    parts = [word.split('/') for word in words.split()]
    return [Size(int(n), int(k), *map(float, rest)) for n, k, *rest in parts]
  if quick:
    return [Size(16, 4)]
  fitting = min(WHOLE, _fitting())
  return [Size(16, 1, 0.0), Size(16, 1), Size(fitting, 1), Size(WHOLE, 8)]


def _rows_of(size: Size) -> Iterator[Row]:
  name = size.name
  experiment, config = _experiment(size, size.rates_per_s[0])
  alone = {rate: _alone(size, rate) for rate in size.rates_per_s}
  spec = RaySpec(
    wire=WireSpec('tcp'),
    num_cpus=STARTING / size.num_processes,
    silence_s=60.0,
    gather_s=size.gather_s,
    simulated=True,
    instances_per_process=size.per_process,
  )
  begun_s = time.perf_counter()
  apart = replace(experiment, backend='ray', ray=spec)
  with ray_backend(apart, config) as backend:
    start_s = time.perf_counter() - begun_s
    workers = sorted({*backend.crew.process_ids.values()})
    about = f'of {len(workers)} processes, until they are listened to'
    yield Row(f'{name}.start', start_s, 's', about)
    idle = _use(lambda: backend.wait(backend.now_s() + IDLE_S))
    share = idle.cpu_s / idle.wall_s
    yield Row(f'{name}.idle_driver', share, 'cores', 'that listens to all')
    for rate_per_s, one in alone.items():
      yield from _load(size, rate_per_s, one, backend, workers)
    worker_bytes = sum(map(_share_bytes, workers)) / len(workers)
  memory = worker_bytes / 2**20
  yield Row(f'{name}.process_memory', memory, 'MiB', 'PSS, mean')


def _alone(size: Size, rate_per_s: float) -> Run:
  """The same with all instances simulated in this process."""
  experiment, config = _experiment(size, rate_per_s)
  with backends(experiment, config, PacedBackend) as make:
    return _serve(experiment, config, make())


def _load(
  size: Size, rate_per_s: float, alone: Run, backend: Any, workers: list[int]
) -> Iterator[Row]:
  """What a request costs the driver, and what it waits."""
  experiment, config = _experiment(size, rate_per_s)
  backend.restart_clock()
  run = _serve(experiment, config, backend, workers)
  name = f'{size.name}.at_{rate_per_s:g}'
  records, used = run.outcome.records, run.used
  done = sum(r.outcome == 'completed' for r in records) / len(records)
  yield Row(f'{name}.completed', done, 'ratio', f'of {len(records)}', 1.0)
  about = f'{used.cpu_s / used.wall_s:.2f} of a core at {rate_per_s:g}/s'
  yield Row(f'{name}.driver_s_per_request', run.cost_s, 's', about)
  about = f'{alone.cost_s:.3g} s with all instances simulated in the driver'
  more = run.cost_s / alone.cost_s
  yield Row(f'{name}.driver_over_one_process', more, 'ratio', about)
  cores = used.others_s / used.wall_s
  yield Row(f'{name}.workers', cores, 'cores', 'of all workers, serving')
  about = f'mean TTFT; {alone.ttft_s:.3g} s in one process'
  yield Row(f'{name}.ttft_more', run.ttft_s - alone.ttft_s, 's', about)


def _experiment(
  size: Size, rate_per_s: float
) -> tuple[Experiment, ModelConfig]:
  count = size.instances
  experiment, _ = load(
    RUN,
    [
      f'ClusterSpec.prefill_instances={count // 2}',
      f'ClusterSpec.decode_instances={count - count // 2}',
      f'conversation.num_requests={round(rate_per_s * SECONDS)}',
      f'TraceScale.time_scale={rate_per_s / TRACE_PER_S}',
    ],
    Experiment,
  )
  return experiment, experiment.model.read_config()


def _serve(
  experiment: Experiment,
  config: ModelConfig,
  backend: Any,
  workers: Sequence[int] = (),
) -> Run:
  prepared = prepare(experiment, config)
  without = replace(experiment, keeps_journal=False)
  outcomes: list[Outcome] = []
  used = _use(
    lambda: outcomes.append(serve_once(without, config, prepared, backend)),
    workers,
  )
  return Run(outcomes[0], used)


def _use(work: Any, workers: Sequence[int] = ()) -> Used:
  others_s = _cpu_s(workers)
  cpu_s, wall_s = time.process_time(), time.perf_counter()
  work()
  return Used(
    time.process_time() - cpu_s,
    time.perf_counter() - wall_s,
    _cpu_s(workers) - others_s,
  )


def _fitting() -> int:
  """How many processes the memory that is there holds."""
  text = Path('/proc/meminfo').read_text()
  free_bytes = int(text.split('MemAvailable:')[1].split()[0]) * 1024
  return max(2, int(0.8 * free_bytes / PROCESS_BYTES))


def _share_bytes(process: int) -> int:
  """Memory of a process, what it shares with others divided among them."""
  text = Path(f'/proc/{process}/smaps_rollup').read_text()
  return int(text.split('\nPss:')[1].split()[0]) * 1024


def _cpu_s(processes: Sequence[int]) -> float:
  """Processor seconds of them all so far."""
  ticks = 0
  for process in processes:
    fields = Path(f'/proc/{process}/stat').read_text().rpartition(')')[2]
    ticks += sum(map(int, fields.split()[11:13]))
  return ticks / os.sysconf('SC_CLK_TCK')
