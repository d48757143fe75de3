# SPDX-License-Identifier: Apache-2.0
"""A run whose instances span processes, on one machine or on several.

Every process runs the same command, each with its number, or as SLURM, Open
MPI or Kubernetes numbers them, which JAX finds out itself. The first one
decides, serves and writes the results; the others do on their devices what it
tells.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import signal

from mooncake_jax.distributed.job import JaxJob
from mooncake_jax.model_config import ModelConfig
from scripts.experiment import Experiment
from scripts.gin_source import ConfigError
from scripts.serving import MakeBackend
from scripts.serving import restarted


def join(job: JaxJob, experiment: Experiment) -> bool:
  """Makes this process one of the job; whether it is the first."""
  from scripts.device import num_devices
  from scripts.device import start_jax

  # A CPU's; where JAX is to find out the processes, more than are used.
  start_jax(-(-num_devices(experiment.cluster) // (job.num_processes or 1)))
  return job.join()


def add_options(parser: argparse.ArgumentParser) -> None:
  """Says of a process which one it is."""
  add = parser.add_argument
  add('--multihost', action='store_true', help='numbered as SLURM says')
  add('--coordinator', metavar='HOST:PORT', help='of the first process')
  add('--num-processes', type=int)
  add('--process-id', type=int, help='from 0')


def job_of(args: argparse.Namespace, experiment: Experiment) -> JaxJob | None:
  """What the options say; None of a run in one process.

  Raises:
    ConfigError: some are missing, or the run needs none.
  """
  said = (args.coordinator, args.num_processes, args.process_id)
  if not args.multihost and not any(x is not None for x in said):
    return None
  if not args.multihost and None in said:
    raise ConfigError(
      f'--coordinator={said[0]} --num-processes={said[1]} '
      f'--process-id={said[2]}: give all three, or --multihost'
    )
  if experiment.backend != 'device':
    raise ConfigError(
      f'Experiment.backend={experiment.backend!r}: only "device" takes '
      'several processes'
    )
  return JaxJob(*said)


@contextmanager
def on_hosts(
  job: JaxJob, experiment: Experiment, config: ModelConfig
) -> Iterator[MakeBackend]:
  """As `serving.backends`, in the first of several processes."""
  from scripts.device import device_backend

  with device_backend(experiment, config, job) as backend:
    yield partial(restarted, backend)


def follow(experiment: Experiment) -> None:
  """Does what the first process tells, to its end.

  Raises:
    OSError: that process is gone.
  """
  from mooncake_jax.distributed import hosts
  from scripts.device import loaded

  # Told to end are all at once: the first ends, and tells the others.
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  # SSDs and stores are the first one's.
  cluster = replace(experiment.cluster, ssd_bytes=0, mooncake_bytes=0)
  own = replace(experiment, cluster=cluster, store=None)
  with loaded(own, experiment.model.read_config()) as backend:
    hosts.follow(backend)
