# SPDX-License-Identifier: Apache-2.0
"""Serves a workload from an idle cluster to the end, once or several times."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
import gc
from typing import Protocol

from mooncake_jax.backend import Backend
from mooncake_jax.changes import Changes
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.work_costs import belief_of
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.costs.links import with_links
from mooncake_jax.events import Event
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.on_devices import OnDevices
from mooncake_jax.report.unfinished import Unfinished
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Journal
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.systems.vllm import serve_vllm
from mooncake_jax.systems.vllm import VllmSpec
from scripts.experiment import Experiment
from scripts.resuming import rest_of
from scripts.warming import warmed
from scripts.workloads import Prepared


class MakeBackend(Protocol):
  """Gives an idle backend whose clock stands at `at_s`; 0 in a simulation."""

  def __call__(self, at_s: float = 0.0) -> Backend: ...


@dataclass(frozen=True)
class Outcome:
  """What serving a workload once gave, on which devices; no simulation's."""

  records: list[RequestRecord]
  journal: Journal
  summary: Summary
  prepared: Prepared
  devices: Sequence[DeviceName] = ()


def prepare(experiment: Experiment, config: ModelConfig) -> Prepared:
  """The workload's requests, with tokens where devices need them.

  Raises:
    ValueError: there are none, as clients send them.
  """
  if experiment.workload is None:
    raise ValueError(
      'Experiment.workload=None: clients send requests, scripts/serve.py '
      'serves them'
    )
  return experiment.workload.prepare(
    experiment.model,
    config,
    experiment.cluster,
    tokens=not experiment.is_simulated,
  )


def serve_once(
  experiment: Experiment,
  config: ModelConfig,
  prepared: Prepared,
  backend: Backend,
  on_event: Callable[[Event], None] | None = None,
  unfinished: Unfinished | None = None,
) -> Outcome:
  """Serves on an idle backend whose clock stands at 0.

  Args:
    unfinished: what earlier parts of the run have served, at whose `at_s` the
      clock stands then; records go there as they end.
  """
  if experiment.vllm is not None:
    return _serve_vllm(experiment, experiment.vllm, prepared)
  experiment = believed(experiment, backend)
  conductor = conductor_of(experiment, config)
  cluster = cluster_of(experiment, config, backend, conductor)
  ended: list[RequestRecord] = []
  requests, keep = prepared.requests, None
  if unfinished is not None:
    requests = rest_of(prepared, unfinished.records)
    ended += unfinished.records
    keep = partial(_keep, ended, unfinished)
  with (
    rare_collections(),
    warmed(experiment, config, cluster, backend, on_event) as on_event,
  ):
    records, journal = serve(
      requests,
      conductor,
      cluster,
      prepared.follow_up,
      on_event,
      experiment.keeps_journal,
      experiment.changes,
      on_record=keep,
    )
  records += sorted(ended, key=lambda record: record.arrival_s)
  is_whole = unfinished is None or len(unfinished.parts) == 1
  summary = summarize(
    records,
    experiment.slo,
    instances=experiment.num_nodes,
    # Of earlier parts nobody knows what their links carried.
    links=backend.link_uses() if is_whole else None,
  )
  return Outcome(records, journal, summary, prepared, devices_of(backend))


def devices_of(backend: Backend) -> list[DeviceName]:
  """What it computes on, in whatever processes; nothing in a simulation."""
  return backend.devices() if isinstance(backend, OnDevices) else []


def _keep(
  ended: list[RequestRecord], unfinished: Unfinished, record: RequestRecord
) -> None:
  ended.append(record)
  unfinished.keep(record)


def serve_alone(experiment: Experiment) -> Outcome:
  """Serves an experiment's workload once, on a backend made for it."""
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  with backends(experiment, config) as make_backend:
    return serve_once(experiment, config, prepared, make_backend())


def _serve_vllm(
  experiment: Experiment, spec: VllmSpec, prepared: Prepared
) -> Outcome:
  """The same requests on coupled instances; nobody tells events.

  Raises:
    ValueError: something would have to happen while they serve.
  """
  if prepared.follow_up is not None or experiment.changes != Changes():
    raise ValueError(
      f'Experiment.vllm serves requests that are known before, and nothing '
      f'changes meanwhile: not Experiment.changes={experiment.changes} with '
      f'{prepared.total - len(prepared.requests)} follow-ups'
    )
  records = serve_vllm(
    prepared.requests,
    spec,
    experiment.truth or experiment.costs,
    experiment.cluster.block_size_tokens,
  )
  summary = summarize(records, experiment.slo, instances=experiment.num_nodes)
  return Outcome(records, [], summary, prepared)


@contextmanager
def rare_collections() -> Iterator[None]:
  """Cyclic garbage is looked for less often.

  What a run makes goes by reference counts; a pass over all of a store's
  blocks every 700 new objects finds next to nothing and takes a third of a
  simulation's time.
  """
  before = gc.get_threshold()
  gc.collect()
  gc.set_threshold(100_000, 50, 1000)
  try:
    yield
  finally:
    gc.set_threshold(*before)


def believed(experiment: Experiment, backend: Backend) -> Experiment:
  """With links as they were measured, where that is asked for."""
  if experiment.ray is None or not experiment.ray.measures_links:
    return experiment
  from mooncake_jax.distributed.backend import RayBackend  # brings Ray
  from mooncake_jax.distributed.link_speeds import measure_ways

  assert isinstance(backend, RayBackend)
  costs = with_links(experiment.costs, measure_ways(backend.crew))
  return replace(experiment, costs=costs)


def conductor_of(
  experiment: Experiment,
  config: ModelConfig,
  kind: type[Conductor] = Conductor,
) -> Conductor:
  """The experiment's Conductor, which has decided nothing yet."""
  return kind(
    experiment.conductor,
    experiment.cluster,
    config,
    experiment.costs,
    experiment.slo,
    _beliefs(experiment, config),
  )


def cluster_of(
  experiment: Experiment,
  config: ModelConfig,
  backend: Backend,
  conductor: Conductor,
) -> Cluster:
  """The experiment's idle cluster."""
  recheck = conductor.keeps_tbt if experiment.conductor.checks_late else None
  return Cluster(experiment.cluster, config, backend, recheck, experiment.costs)


def _beliefs(
  experiment: Experiment, config: ModelConfig
) -> dict[str, InstanceBelief]:
  """What the Conductor counts on where instances differ."""
  return {
    name: belief_of(experiment.cluster.of(name), config, costs)
    for name, costs in experiment.instances.items()
  }


def boundary_s(experiment: Experiment, config: ModelConfig) -> float:
  """Of a chunk's activations to the next stage, in KVCache's dtype."""
  cluster, truth = experiment.cluster, experiment.truth or experiment.costs
  num_bytes = cluster.chunk_tokens * config.model_dim * cluster.kv_dtype_bytes
  return truth.transfer_s(num_bytes, 'handoff')


@contextmanager
def backends(
  experiment: Experiment,
  config: ModelConfig,
  simulated: type[VirtualBackend] = VirtualBackend,
) -> Iterator[MakeBackend]:
  """What gives an idle backend for each run of an experiment.

  A simulation's is `simulated`, one that jumps or one that keeps pace.

  Devices are loaded and compiled for once, and taken again; bytes that a run
  left in their segments lie there unknown to the next.
  """
  if experiment.backend == 'virtual':
    truth = experiment.truth or experiment.costs
    cluster = experiment.cluster
    instances = experiment.true_instances
    yield lambda at_s=0.0: simulated(
      truth,
      cluster.layers_of_stages(config),
      instances=experiment.instances if instances is None else instances,
      partners=cluster.partners,
      boundary_s=boundary_s(experiment, config),
    )
    return
  if experiment.backend == 'ray':
    from scripts.ray_cluster import ray_backend as opened
  else:
    from scripts.device import device_backend as opened

  with opened(experiment, config) as backend:
    yield partial(restarted, backend)


class Restartable(Backend, Protocol):
  """A backend whose clock can be set."""

  def restart_clock(self, *, at_s: float = 0.0) -> None: ...


def restarted(backend: Restartable, at_s: float = 0.0) -> Backend:
  """The same idle backend, whose clock stands at `at_s`."""
  backend.restart_clock(at_s=at_s)
  return backend
