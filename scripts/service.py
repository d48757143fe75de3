# SPDX-License-Identifier: Apache-2.0
"""An experiment's cluster behind the gateway, ready to serve clients."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import time

from mooncake_jax.gateway.app import Gateway
from mooncake_jax.gateway.asked import Served
from mooncake_jax.gateway.board import Board
from mooncake_jax.gateway.codec import placeholders
from mooncake_jax.gateway.driver import Driver
from mooncake_jax.gateway.measures import Measures
from mooncake_jax.gateway.tenants import Tenants
from mooncake_jax.gateway.watching import Recent
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.sim.paced import PacedBackend
from scripts.experiment import Experiment
from scripts.models import stop_token_ids
from scripts.serving import backends
from scripts.serving import believed
from scripts.serving import cluster_of
from scripts.serving import conductor_of


@contextmanager
def gateway(experiment: Experiment, tenants: Tenants) -> Iterator[Gateway]:
  """The experiment's cluster, loaded and compiled where it is on devices.

  Raises:
    ValueError: an experiment of another system than the cluster.
  """
  if experiment.vllm is not None:
    raise ValueError(f'Experiment.vllm={experiment.vllm} serves no clients')
  if experiment.snapshot is not None:
    raise ValueError(
      f'Experiment.snapshot={experiment.snapshot} is for scripts/run.py'
    )
  config, spec = experiment.model.read_config(), experiment.gateway
  with backends(experiment, config, PacedBackend) as make_backend:
    backend = make_backend()
    experiment = believed(experiment, backend)
    conductor = conductor_of(experiment, config)
    served = served_of(experiment, config)
    measures, recent = Measures(experiment.slo), Recent(spec.max_told)
    cluster = cluster_of(experiment, config, backend, conductor)
    driver = Driver(
      cluster, conductor, spec.max_open_choices, (measures, recent)
    )
    mode = 'simulated' if served.is_simulated else 'on devices'
    board = Board(driver, recent, experiment.title, mode)
    yield Gateway(served, driver, tenants, spec, measures, recent, board)


def served_of(experiment: Experiment, config: ModelConfig) -> Served:
  """The model, its tokenizer and what requests may be."""
  model, cluster = experiment.model, experiment.cluster
  codec = (experiment.tokenizer or model).load_tokenizer(config)
  is_simulated = experiment.is_simulated
  path = model.find()
  return Served(
    experiment.gateway.model_name or _name(path),
    codec,
    getattr(codec, 'vocab_size', config.vocab_size),
    cluster.max_request_tokens(config),
    cluster.block_size_tokens,
    '0' if is_simulated else model.identity(cluster.kv_dtype),
    stop_token_ids(codec),
    placeholders(codec) if is_simulated else (),
    int(time.time()),
  )


def _name(path: Path | None) -> str:
  return 'random-weights' if path is None else path.stem
