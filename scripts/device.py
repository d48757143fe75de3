# SPDX-License-Identifier: Apache-2.0
"""The engine for an experiment's cluster, on whatever devices there are."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
import sys
from urllib.parse import unquote
from urllib.parse import urlparse

import jax

from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.distributed.hosts import led
from mooncake_jax.distributed.job import JaxJob
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spec import Role
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.host_memory import keep_freed_memory
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from scripts.experiment import Experiment
from scripts.gin_source import ROOT
from scripts.kv_scales import measured_scales
from scripts.program_cache import keep_programs


@contextmanager
def device_backend(
  experiment: Experiment, config: ModelConfig, job: JaxJob | None = None
) -> Iterator[DeviceBackend]:
  """Loads weights onto each instance and compiles; ends all at the end.

  Args:
    job: whose other processes this one leads.

  Raises:
    ValueError: too few devices.
  """
  with loaded(experiment, config) as backend:
    with nullcontext() if job is None else led(backend, job.address):
      seconds = warmup(backend)
      print(f'loaded and compiled in {seconds:.0f} s', file=sys.stderr)
      yield backend


@contextmanager
def loaded(
  experiment: Experiment, config: ModelConfig
) -> Iterator[DeviceBackend]:
  """The engine with its weights, of which nothing is compiled yet."""
  spec = experiment.cluster
  start_jax(num_devices(spec))
  instances = [
    replace(instance, attention=experiment.attention)
    for instance in instance_specs(spec, config)
  ]
  model = experiment.model
  if model.path is not None and model.find() is None:
    print(
      f'{model.path}: not there, random weights instead; scripts/get_model.py '
      'fetches a model',
      file=sys.stderr,
    )
  stores = _stores(experiment, config)
  # CPU devices share one tree; elsewhere each instance reads its own slices,
  # and int8 weights are made of them there.
  scales = measured_scales(model, spec.kv_dtype)
  is_small = model.weights == 'int8' or scales is not None
  is_shared = jax.default_backend() == 'cpu' and not is_small
  with DeviceBackend(
    config,
    spec.layout(config),
    instances,
    model.load_params()
    if is_shared
    else partial(model.load_params, scales=scales),
    kv_dtype=spec.kv_dtype,
    stores=stores,
  ) as backend:
    yield backend


def _stores(
  experiment: Experiment, config: ModelConfig
) -> list[MooncakeSegment]:
  """Joins the Mooncake Store, if the cluster uses one.

  Raises:
    ImportError, MooncakeError: it can't be joined.
  """
  spec = experiment.cluster
  if experiment.store is None:
    return []
  dtype = jax.numpy.dtype(spec.kv_dtype)
  block = BlockFormat.of(config, spec.block_size_tokens, dtype)
  return [MooncakeSegment(REMOTE, experiment.store, block, spec.mooncake_bytes)]


def num_devices(spec: ClusterSpec) -> int:
  """How many a cluster takes."""
  prefill = sum(spec.of(name).tensor_parallel for name in spec.prefill_names)
  decode = sum(spec.of(name).tensor_parallel for name in spec.decode_names)
  return prefill * spec.stages + (0 if spec.colocated else decode)


def start_jax(num_devices: int) -> None:
  """Keeps compiled programs for the next run; a CPU becomes many devices.

  Programs lie in `.jax_cache`, or where `JAX_COMPILATION_CACHE_DIR` says.
  And keeps freed memory: a CPU step's temporaries are a third slower to write
  where they are new to the process each time.
  """
  keep_freed_memory()  # before there are threads
  keep_programs(ROOT / '.jax_cache')
  there = jax.config.jax_num_cpu_devices  # pyright: ignore
  if there >= num_devices:
    return
  try:
    jax.config.update('jax_num_cpu_devices', num_devices)
  except RuntimeError:
    pass  # JAX runs already: if its devices are too few, the engine says so


def instance_specs(
  spec: ClusterSpec, config: ModelConfig
) -> list[InstanceSpec]:
  """The engine's instances, prefill first."""
  hosts = {decode: prefill for prefill, decode in spec.partners.items()}
  return [
    *(_instance(spec, config, n, 'prefill') for n in spec.prefill_names),
    *(
      replace(_instance(spec, config, n, 'decode'), shares_with=hosts.get(n))
      for n in spec.decode_names
    ),
  ]


def _instance(
  spec: ClusterSpec, config: ModelConfig, name: str, role: Role
) -> InstanceSpec:
  max_tokens, spec = spec.max_request_tokens(config), spec.of(name)
  role = 'both' if spec.switchable else role
  prefills, decodes = role != 'decode', role != 'prefill'
  num_pages = max(prefills * spec.prefill_pages, decodes * spec.decode_pages)
  return InstanceSpec(
    name,
    role,
    num_pages=num_pages,
    max_tokens=max_tokens,
    num_devices=spec.tensor_parallel,
    stage_layers=spec.layers_of_stages(config) if prefills else (),
    executor=spec.executor,
    layers_per_group=(
      spec.layers_per_transfer
      if prefills and spec.streaming == 'layers'
      else None
    ),
    chunk_buckets=spec.chunk_buckets,
    max_batch=spec.max_batch,
    batch_buckets=batch_buckets(spec.max_batch),
    host_bytes=spec.host_bytes if prefills else 0,
    ssd_url=_ssd_url(spec, name) if prefills else None,
    ssd_bytes=spec.ssd_bytes if prefills else 0,
  )


def _ssd_url(spec: ClusterSpec, name: str) -> str | None:
  """A place below the cluster's; of a local one the folder is made."""
  if not spec.ssd_bytes:
    return None
  if spec.ssd_url is None:
    raise ValueError(
      f'ClusterSpec.ssd_url={spec.ssd_url} must say where the '
      f'ssd_bytes={spec.ssd_bytes} lie on devices'
    )
  url = f'{spec.ssd_url.rstrip("/")}/{name}/'
  if url.startswith('file://'):
    Path(unquote(urlparse(url).path)).mkdir(parents=True, exist_ok=True)
  return url


def batch_buckets(max_batch: int) -> tuple[int, ...]:
  """4, 8, 16, ... to the largest: 6 gives 4 and 6, 3 gives 3.

  A step of fewer rows reads the same weights and takes as long, but is one
  more program to compile.
  """
  powers = (1 << i for i in range(2, max_batch.bit_length()))
  return tuple(sorted({*powers, max_batch}))
