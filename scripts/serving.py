# SPDX-License-Identifier: Apache-2.0
"""Builds a cluster and serves a workload on it, once."""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mooncake_jax.backend import Backend
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.events import Event
from mooncake_jax.metrics.summary import summarize
from mooncake_jax.metrics.summary import Summary
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Journal
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from scripts.experiment import Experiment
from scripts.workloads import Session


@dataclass(frozen=True)
class Outcome:
  """What serving a workload once gave."""

  records: list[RequestRecord]
  journal: Journal
  summary: Summary


def make_session(experiment: Experiment, config: ModelConfig) -> Session:
  """The workload's requests, with tokens where devices need them."""
  return experiment.workload.session(
    experiment.model,
    config,
    experiment.cluster,
    tokens=experiment.backend == 'device',
  )


def serve_session(
  experiment: Experiment,
  config: ModelConfig,
  session: Session,
  on_event: Callable[[Event], None] | None = None,
) -> Outcome:
  """Serves a session from an idle cluster to the end."""
  conductor = Conductor(
    experiment.conductor,
    experiment.cluster,
    config,
    experiment.costs,
    experiment.slo,
  )
  recheck = conductor.keeps_tbt if experiment.conductor.late_check else None
  with backend(experiment, config) as started:
    cluster = Cluster(experiment.cluster, config, started, recheck)
    records, journal = serve(
      session.requests, conductor, cluster, session.follow_up, on_event
    )
  summary = summarize(records, experiment.slo)
  return Outcome(records, journal, summary)


@contextmanager
def backend(experiment: Experiment, config: ModelConfig) -> Iterator[Backend]:
  """The physics of a run, closed at the end."""
  if experiment.backend == 'virtual':
    yield VirtualBackend(experiment.truth or experiment.costs)
    return
  from scripts.device import device_backend

  with device_backend(experiment, config) as started:
    yield started
