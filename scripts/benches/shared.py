# SPDX-License-Identifier: Apache-2.0
"""Blocks of a store that processes share, beside its own client alone.

A driver has an instance in a process of its own put blocks of its pages there
and read them back into pages, sealed and checked; the bare client moves the
same objects in this process, in calls of as many blocks. In turns; new keys
each turn, as a put of a known key moves nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import itertools
import sys
import time

import numpy as np

from mooncake_jax.backend import Backend
from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.distributed.worker import WorkerSpec
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_lane import Job
from mooncake_jax.transfer.mooncake_object import SEAL_BYTES
from mooncake_jax.transfer.mooncake_source import MooncakeSource
from scripts.benches.real import seconds_of
from scripts.benches.rows import Row
from scripts.config import load
from scripts.experiment import Experiment
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage
from scripts.ray_cluster import on_devices

RUN = 'configs/run/ray_small.gin'
MIB = 1 << 20
# KVCache of 16 KiB a token.
MODEL = ModelConfig(
  'llama',
  vocab_size=64,
  model_dim=64,
  mlp_dim=64,
  num_layers=8,
  num_heads=4,
  num_kv_heads=4,
  head_dim=64,
  max_tokens=4096,
)
BLOCK_TOKENS = {'1MiB': 64, '8MiB': 512}
MOVED_BYTES, STORE_BYTES = 64 * MIB, 512 * MIB
TIMEOUT_S = 20.0
Seconds = tuple[float, float]  # of puts and of reads


def shared(quick: bool) -> Iterator[Row]:
  """GB/s by way and size, and ours as a share of the bare client's."""
  try:
    import_wheel('mooncake.store')
  except ImportError as error:
    print(f'no rows of a shared store: {error}', file=sys.stderr)
    return
  turns = 5 if quick else 15
  with running_master() as master:
    with running_storage(master.address, STORE_BYTES) as storage:
      there = MooncakeConfig(master.address, timeout_s=TIMEOUT_S)
      ways = {'tcp': there, 'shared': replace(there, daemon=storage.address)}
      for size, tokens in BLOCK_TOKENS.items():
        with _instances(tokens, ways) as instances:
          for way, config in ways.items():
            ours = instances[way]
            bare = Bare(config, ours.layout.block_bytes + SEAL_BYTES)
            took = [_turn(ours, bare) for _ in range(turns + 1)]
            bare.close()
            yield from _rows(f'mooncake.{way}.instance.{size}', took[1:])


def _turn(ours: 'Instance', bare: 'Bare') -> tuple[Seconds, Seconds]:
  seconds = ours.move(), bare.move()
  bare.remove([key.hex() for key in ours.keys])
  return seconds


def _rows(name: str, took: list[tuple[Seconds, Seconds]]) -> Iterator[Row]:
  for i, what in enumerate(('put', 'fetch')):
    ours_s = min(ours[i] for ours, _ in took)
    bare_s = min(bare[i] for _, bare in took)
    yield Row(f'{name}.{what}', MOVED_BYTES / ours_s / 1e9, 'GB/s')
    yield Row(f'{name}.{what}_bare', MOVED_BYTES / bare_s / 1e9, 'GB/s')
    yield Row(
      f'{name}.{what}_share',
      bare_s / ours_s,
      'ratio',
      'bytes a second over those of the bare client, the best of turns each',
    )


@dataclass
class Instance:
  """One in a process of its own, told what to move by this one.

  Attributes:
    keys: what it moved last.
  """

  backend: Backend
  name: str
  layout: KVLayout
  numbers: Iterator[int]
  keys: list[bytes] = field(default_factory=list)

  def move(self) -> Seconds:
    """Seconds of a put of other blocks, and of a read of those."""
    count = MOVED_BYTES // self.layout.block_bytes
    self.keys = [next(self.numbers).to_bytes(32, 'big') for _ in range(count)]
    return self._seconds(are_puts=True), self._seconds(are_puts=False)

  def _seconds(self, are_puts: bool) -> float:
    replicas = [Replica(REMOTE, next(self.numbers), key) for key in self.keys]
    num_pages = len(replicas) * self.layout.pages_per_block
    pages = DevicePages(self.name, tuple(range(1, num_pages + 1)))
    ops = BlockOps(self.layout, pages, replicas, range(len(replicas)), are_puts)
    backend, begun_s = self.backend, time.perf_counter()
    backend.transfer(ops, 0, backend.now_s() + TIMEOUT_S)
    (end,) = backend.wait(None)
    seconds = time.perf_counter() - begun_s
    if end.status != 'completed':
      raise RuntimeError(end.why)
    backend.drop(tuple(replicas))
    return seconds


@contextmanager
def _instances(
  block_tokens: int, ways: dict[str, MooncakeConfig]
) -> Iterator[dict[str, Instance]]:
  """An instance a way, each in a process."""
  require_token()
  from mooncake_jax.distributed.backend import RayBackend  # brings Ray

  layout, workers = _workers(block_tokens, ways)
  numbers = itertools.count(1)
  with RayBackend(layout, [*workers.values()], RaySpec()) as backend:
    yield {
      way: Instance(backend, worker.name, layout, numbers)
      for way, worker in workers.items()
    }


def _workers(
  block_tokens: int, ways: dict[str, MooncakeConfig]
) -> tuple[KVLayout, dict[str, WorkerSpec]]:
  base, _ = load(RUN, (), Experiment)
  cluster = ClusterSpec(
    prefill_instances=len(ways),
    decode_instances=1,
    block_size_tokens=block_tokens,
    page_tokens=64,
    chunk_tokens=64,
    layers_per_transfer=MODEL.num_layers,
    max_tokens=512,
    prefill_pool_tokens=MODEL.max_tokens,
    decode_pool_tokens=512,
    host_bytes=0,
  )
  base = replace(
    base,
    model=replace(base.model, config=MODEL),
    cluster=cluster,
    ray=RaySpec(wire=WireSpec('tcp')),
  )
  made = on_devices(base, MODEL)
  return cluster.layout(MODEL), {
    way: replace(worker, store=MooncakeSource(config, STORE_BYTES))
    for worker, (way, config) in zip(made, ways.items())
  }


class Bare:
  """The store's client in this process, with as much memory."""

  def __init__(self, config: MooncakeConfig, num_bytes: int):
    """Joins, for objects of this size."""
    self._num_bytes = num_bytes
    self._batch = config.batch_blocks
    self._client = MooncakeClient(config, MOVED_BYTES + MIB)
    self._client.memory[:] = 1
    self._numbers = itertools.count()

  def move(self) -> Seconds:
    """Seconds of a put of other objects, and of a read of those."""
    client, size = self._client, self._num_bytes
    turn = next(self._numbers)
    jobs = [
      Job(client.put, f'bare{id(self)}.{turn}.{i}', self._slot(i), 0.0)
      for i in range(MOVED_BYTES // size)
    ]
    calls = [
      jobs[i : i + self._batch] for i in range(0, len(jobs), self._batch)
    ]
    put_s = sum(seconds_of(client.put, call, 0) for call in calls)
    get_s = sum(seconds_of(client.get, call, size) for call in calls)
    self.remove([job.key for job in jobs])
    return put_s, get_s

  def remove(self, keys: list[str]) -> None:
    """Makes room, whoever put them."""
    run, nothing = self._client.remove_now, np.empty(0, np.uint8)
    self._client.remove_now([Job(run, key, nothing, 0.0) for key in keys])

  def close(self) -> None:
    self._client.close(lambda: True)

  def _slot(self, i: int) -> np.ndarray:
    return self._client.memory[i * self._num_bytes : (i + 1) * self._num_bytes]
