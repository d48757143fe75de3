# SPDX-License-Identifier: Apache-2.0
"""An experiment's instances as processes, on a Ray cluster."""

from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import secrets
import sys
import time
from typing import TYPE_CHECKING

from mooncake_jax.distributed.sim_worker import SimWorkerSpec
from mooncake_jax.distributed.spec import ProcessSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.distributed.worker import WorkerSpec
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.mooncake_client import reach
from mooncake_jax.transfer.mooncake_source import MooncakeSource
from scripts.device import instance_specs
from scripts.device import start_jax
from scripts.experiment import Experiment
from scripts.kv_scales import measured_scales
from scripts.serving import boundary_s

MANY = 20

if TYPE_CHECKING:
  from mooncake_jax.distributed.backend import RayBackend


@contextmanager
def ray_backend(
  experiment: Experiment, config: ModelConfig
) -> Iterator['RayBackend']:
  """Has each instance load and compile in a process of its own.

  Raises:
    RuntimeError: an instance can't start, or the store is not there.
  """
  assert experiment.ray is not None
  require_token()
  if experiment.store is not None:
    # Instances wait for a store; this one may be the wrong address.
    reach(experiment.store.master, experiment.store.timeout_s)
  from mooncake_jax.distributed.backend import RayBackend  # brings Ray

  begun_s = time.perf_counter()
  layout = experiment.cluster.layout(config)
  workers = worker_specs(experiment, config)
  absent = experiment.cluster.absent
  with RayBackend(
    layout, workers, experiment.ray, absent=absent, on_start=_tell_tenths
  ) as backend:
    seconds = time.perf_counter() - begun_s
    print(f'started and compiled in {seconds:.0f} s', file=sys.stderr)
    yield backend


def _tell_tenths(there: int, wanted: int) -> None:
  """Says how far the start is, of many processes at every tenth."""
  if wanted >= MANY and 10 * there // wanted > 10 * (there - 1) // wanted:
    print(f'{there} of {wanted} processes are there', file=sys.stderr)


def worker_specs(
  experiment: Experiment, config: ModelConfig
) -> Sequence[ProcessSpec]:
  """A process an instance."""
  assert experiment.ray is not None
  if experiment.ray.simulated:
    return _simulated(experiment, config, experiment.ray)
  return on_devices(experiment, config)


def _simulated(
  experiment: Experiment, config: ModelConfig, spec: RaySpec
) -> list[SimWorkerSpec]:
  cluster, secret = experiment.cluster, secrets.token_hex(32)
  layers = cluster.layers_of_stages(config)
  pause_s = boundary_s(experiment, config)
  return [
    SimWorkerSpec(
      name,
      experiment.instances.get(name, experiment.costs),
      layers,
      pause_s,
      spec.wire,
      secret,
      spec.tokens_wait_s,
    )
    for name in (*cluster.prefill_names, *cluster.decode_names)
  ]


def on_devices(experiment: Experiment, config: ModelConfig) -> list[WorkerSpec]:
  """Prefill instances first; each reads the checkpoint itself."""
  assert experiment.ray is not None
  cluster, model = experiment.cluster, experiment.model
  scales = measured_scales(model, cluster.kv_dtype)
  instances = [
    replace(instance, attention=experiment.attention)
    for instance in instance_specs(cluster, config)
  ]
  store = None
  if experiment.store is not None:
    store = MooncakeSource(experiment.store, cluster.mooncake_bytes)
  names, secret = [i.name for i in instances], secrets.token_hex(32)
  counts = [processes_of(instance, experiment.ray) for instance in instances]
  return [
    WorkerSpec(
      config,
      cluster.layout(config),
      instance,
      tuple(name for name in names if name != instance.name),
      partial(model.load_params, scales=scales),
      cluster.kv_dtype,
      experiment.ray.wire,
      secret,
      partial(start_jax, instance.num_devices * instance.num_stages // count),
      store,
      count,
    )
    for instance, count in zip(instances, counts)
  ]


def processes_of(instance: InstanceSpec, spec: RaySpec) -> int:
  """That an instance spans; raises ValueError if it can't."""
  count = instance.num_devices * instance.num_stages
  most = spec.devices_per_process
  if most is None or count <= most:
    return 1
  if count % most:
    raise ValueError(
      f'RaySpec.devices_per_process={most} must divide the '
      f'{count} devices of {instance.name}'
    )
  return count // most
