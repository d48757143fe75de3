# SPDX-License-Identifier: Apache-2.0
"""Recompute and fetch, measured on this machine with the engine and the store.

A round serves, for each prefix length, one prompt that nobody has seen, and
then the same prefix with another end from each place where it may lie. Sources
take turns, so that what disturbs the machine disturbs them alike. Each prompt
goes the whole way: a cluster's queue, its Master's lease, the read, chunks
that begin as layers arrive, puts and handoff. Where a prefix was read from is
what the cluster's events say.

Files of the SSD are written out and forgotten by the operating system before
they are read: else memory would be measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
import os
from pathlib import Path
from tempfile import TemporaryDirectory
import time
from urllib.parse import unquote
from urllib.parse import urlparse

import numpy as np

from mooncake_jax.assess.measured import Measured
from mooncake_jax.assess.measured import NEAREST
from mooncake_jax.assess.measured import RECOMPUTE
from mooncake_jax.assess.measured import Trial
from mooncake_jax.backend import Backend
from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import WorkDone
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.report.environment import environment
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import devices_of
from scripts.serving import rare_collections

HERE, THERE, DECODE = 'prefill0', 'prefill1', 'decode0'
LEASE_S = 2.0  # longer than any read
# The tokens of `PrefixFetched` that a source must have brought.
FIELDS = {
  NEAREST: 'device_tokens',
  'DRAM': 'local_tokens',
  'remote DRAM': 'remote_tokens',
  'SSD': 'ssd_tokens',
}


def measure_here(
  experiment: Experiment, budget_s: float = 120.0, repeats: int = 20
) -> Measured:
  """Serves prompts alone until `repeats` rounds, or the time, are over.

  Args:
    experiment: on devices, with two prefill instances and an SSD;
      `device_cache_tokens` hold the longest prompt.
    budget_s: no round begins after it, but the second.

  Raises:
    ValueError: a cluster that has not all of these.
  """
  config = experiment.model.read_config()
  spec = _checked(experiment, config)
  began_s, started = time.monotonic(), datetime.now()
  with _own_folder(spec) as spec, rare_collections():
    there = replace(experiment, cluster=spec)
    with backends(there, config) as make_backend:
      backend = make_backend()
      both = _Prompts.both(spec, config, backend)
      lengths = [*_lengths(spec, spec.max_request_tokens(config))]
      trials = _rounds(both, lengths, budget_s, repeats)
      devices = [device.name for device in devices_of(backend)]
  return Measured(
    experiment.title,
    config,
    experiment.backend,
    spec.kv_dtype_bytes,
    spec.block_size_tokens,
    time.monotonic() - began_s,
    trials,
    environment(devices, None, started.isoformat(timespec='seconds')),
  )


def _rounds(
  both: tuple['_Prompts', '_Prompts'],
  lengths: list[int],
  budget_s: float,
  repeats: int,
) -> tuple[Trial, ...]:
  for length in lengths:  # warms up
    _round(both, length)
  trials: list[Trial] = []
  began_s = time.monotonic()
  for each in range(repeats):
    for length in lengths:
      trials += _round(both, length)
    if each and time.monotonic() - began_s > budget_s:
      break
  return tuple(trials)


@contextmanager
def _own_folder(spec: ClusterSpec) -> Iterator[ClusterSpec]:
  """SSD segments in a new folder of that disk: nothing is hit from before."""
  parent = _folder(spec)
  parent.mkdir(parents=True, exist_ok=True)
  with TemporaryDirectory(dir=parent) as own:
    yield replace(spec, ssd_url=f'file://{own}')


def _folder(spec: ClusterSpec) -> Path:
  return Path(unquote(urlparse(spec.ssd_url or '').path))


def _checked(experiment: Experiment, config: ModelConfig) -> ClusterSpec:
  spec = replace(experiment.cluster, promote_hits=1 << 30)
  if experiment.backend == 'virtual':
    raise ValueError("Experiment.backend='virtual': nothing is measured there")
  if spec.prefill_instances < 2 or not spec.reuse:
    raise ValueError(
      f'ClusterSpec.prefill_instances={spec.prefill_instances}, reuse='
      f'{spec.reuse}: a fetch takes two that reuse'
    )
  if not (spec.ssd_bytes and (spec.ssd_url or '').startswith('file:')):
    raise ValueError(
      f'ClusterSpec.ssd_bytes={spec.ssd_bytes}, ssd_url={spec.ssd_url!r}: '
      'must be a folder of this machine'
    )
  longest = spec.max_request_tokens(config)
  if spec.device_cache_tokens < longest:
    raise ValueError(
      f'ClusterSpec.device_cache_tokens={spec.device_cache_tokens} must hold '
      f'max_tokens={longest}'
    )
  return spec


def _lengths(spec: ClusterSpec, most: int) -> Iterator[int]:
  """From one block on, doubling, as far as prompt and answer fit."""
  length = spec.block_size_tokens
  while length + spec.block_size_tokens < most:
    yield length
    length *= 2


class _Prompts:
  """A cluster to which one prompt after the other is sent."""

  def __init__(self, spec: ClusterSpec, config: ModelConfig, backend: Backend):
    self.spec, self.size = spec, spec.block_size_tokens
    self._vocab = config.vocab_size
    self._rng, self._count = np.random.default_rng(0), 0
    self.cluster = Cluster(spec, config, backend)
    self.cluster.tells_works = True

  @classmethod
  def both(
    cls, spec: ClusterSpec, config: ModelConfig, backend: Backend
  ) -> tuple['_Prompts', '_Prompts']:
    """One that keeps nothing on the device, and one that does."""
    plain = replace(spec, device_cache_tokens=0, lease_s=LEASE_S)
    # A block on the device is not copied, and must go for the next prompt.
    caching = replace(spec, lease_s=LEASE_S / 100, ssd_bytes=0)
    return cls(plain, config, backend), cls(caching, config, backend)

  def prefix(self, num_tokens: int) -> np.ndarray:
    """One that nobody has seen."""
    tokens = self._rng.integers(2, self._vocab, num_tokens)
    return tokens.astype(np.int32)

  def keys(self, prefix: np.ndarray) -> tuple[BlockKey, ...]:
    return prefix_keys(prefix, self.size)

  def serve(
    self, source: str, prefix: np.ndarray, at: str = HERE, **plan
  ) -> Trial:
    """One trial; raises RuntimeError unless it read what it should."""
    self._count += 1
    name, now_s = f'{source} {self._count}', self.cluster.backend.now_s()
    prompt = np.concatenate([prefix, self.prefix(self.size)])
    self.cluster.submit(
      Request(name, now_s, len(prompt), 1, self.keys(prompt), prompt),
      Placement(name, 0, at, DECODE, **plan),
    )
    events = self.run_out()
    _check_source(source, len(prefix), events)
    (done,) = [e for e in events if isinstance(e, PrefillDone)]
    fetches = [
      work.time_s - work.started_s
      for work in events
      if isinstance(work, WorkDone) and work.step == 'fetch'
    ]
    return Trial(source, len(prefix), done.time_s - now_s, sum(fetches))

  def run_out(self) -> list[Event]:
    """All that happens until the cluster is idle."""
    events: list[Event] = []
    while not self.cluster.idle:
      events += self.cluster.step(None)
    return events

  def to_ssd(self, prefix: np.ndarray) -> None:
    """Moves a prefix from host memory to the SSD, and no copy elsewhere."""
    keys, segment = self.keys(prefix), ssd_segment(HERE)
    self.cluster.replicate(keys, HERE, segment)
    self.run_out()
    self.cluster.drop(keys, HERE)
    forget_files(_folder(self.spec))

  def forget(self) -> None:
    """Empties all segments but the devices'."""
    for segment in self.cluster.master.segments():
      if medium(segment) != 'device':
        self.cluster.drop(self.cluster.inventory(segment), segment)
    self.run_out()


def _round(both: tuple[_Prompts, _Prompts], length: int) -> list[Trial]:
  """Every source once, recomputing twice."""
  plain, caching = both
  prefix, blocks = plain.prefix(length), length // plain.size
  found = [plain.serve(RECOMPUTE, prefix)]
  found.append(plain.serve('DRAM', prefix, local_blocks=blocks))
  found.append(
    plain.serve(
      'remote DRAM', prefix, THERE, fetch_blocks=blocks, fetch_from=HERE
    )
  )
  plain.cluster.drop(plain.keys(prefix), THERE)
  plain.to_ssd(prefix)
  found.append(plain.serve('SSD', prefix, local_blocks=blocks))
  plain.forget()
  prefix = caching.prefix(length)
  found.append(caching.serve(RECOMPUTE, prefix))
  found.append(caching.serve(NEAREST, prefix, local_blocks=blocks))
  caching.forget()
  return found


def _check_source(source: str, length: int, events: list[Event]) -> None:
  failed = [e.reason for e in events if isinstance(e, Failed)]
  if failed:
    raise RuntimeError(f'a measured prompt failed: {failed[0]}')
  fetched = next(e for e in events if isinstance(e, PrefixFetched))
  found = {name: getattr(fetched, name) for name in FIELDS.values()}
  wanted = dict.fromkeys(FIELDS.values(), 0)
  if source != RECOMPUTE:
    wanted[FIELDS[source]] = length
  if found != wanted:
    ends = [(e.step, e.status) for e in events if isinstance(e, WorkDone)]
    raise RuntimeError(f'{source}, {length} tokens: read {found}; {ends}')


def forget_files(folder: Path) -> None:
  """Writes a folder's files out and takes them out of the page cache."""
  for parent, _, names in os.walk(folder):
    for name in names:
      # Blocks of the round before go meanwhile, when their leases end.
      with suppress(FileNotFoundError):
        _forget_file(Path(parent) / name)


def _forget_file(path: Path) -> None:
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
  finally:
    os.close(handle)
