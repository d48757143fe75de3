# SPDX-License-Identifier: Apache-2.0
"""Bytes into a real Mooncake Store and back, beside memcpy and a socket.

The store's memory is another process's; over loopback TCP, and over memory
shared with that process. All buffers are warm: this process's were touched
and used before, the store's memory was filled once. Puts are of new keys, as
a put of a known key moves nothing; keys are removed outside the time.
"""

from collections.abc import Callable
import itertools
import sys
import time

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_lane import Job
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from mooncake_jax.transfer.segment import Part
from scripts.benches import limits
from scripts.benches.loopback import loopback
from scripts.benches.real import seconds_of
from scripts.benches.rows import best_s
from scripts.benches.rows import Row
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

MIB = 1 << 20
SIZES = {'64KiB': 64 << 10, '1MiB': MIB, '8MiB': 8 * MIB, '64MiB': 64 * MIB}
BLOCK = BlockFormat(16, 256, 4, 64, np.dtype('float32'))  # 8 MiB
BATCH = 16
ARENA_BYTES = 128 * MIB  # most bytes of one call
STORE_BYTES = 512 * MIB
TIMEOUT_S = 20.0


def mooncake(quick: bool) -> list[Row]:
  """Bytes a second by way, size and blocks a call; none without the wheel."""
  try:
    import_wheel('mooncake.store')
  except ImportError as error:
    print(f'no rows of the real Mooncake Store: {error}', file=sys.stderr)
    return []
  repeats = 5 if quick else 20
  sizes = {k: v for k, v in SIZES.items() if not quick or k in ('1MiB', '8MiB')}
  rows = [*_memcpy(sizes, repeats), *_socket(sizes, repeats)]
  with running_master() as master:
    with running_storage(master.address, STORE_BYTES) as storage:
      for way, daemon in (('tcp', None), ('shared', storage.address)):
        config = MooncakeConfig(
          master.address, daemon=daemon, timeout_s=TIMEOUT_S
        )
        store = Store(config)
        rows += store.rows(way, sizes, repeats)
        store.close()
        rows += _segment(way, config, repeats)
  return rows


def _memcpy(sizes: dict[str, int], repeats: int) -> list[Row]:
  return [
    Row(
      f'mooncake.memcpy.{name}.bytes_per_s',
      limits.copy_bytes_per_s(num_bytes, repeats),
      'B/s',
      'numpy.copyto',
    )
    for name, num_bytes in sizes.items()
  ]


def _socket(sizes: dict[str, int], repeats: int) -> list[Row]:
  rows = []
  array = np.ones(max(sizes.values()), np.uint8)
  with loopback(array.nbytes) as other:
    for name, num_bytes in sizes.items():
      for way, move in (('put', other.put), ('get', other.get)):
        seconds = best_s(lambda: move(array[:num_bytes]), repeats)  # noqa: B023
        metric = f'mooncake.socket.{name}.{way}_bytes_per_s'
        reference = 'one stream, sendall and recv_into'
        rows.append(Row(metric, num_bytes / seconds, 'B/s', reference))
  return rows


def _segment(way: str, config: MooncakeConfig, repeats: int) -> list[Row]:
  """Blocks through our segment: gathered or viewed, with their checksum."""
  num_bytes = BLOCK.num_bytes(0, BLOCK.num_layers)
  part = Part(
    0, BLOCK.num_layers, (np.ones(BLOCK.shape(0, BLOCK.num_layers), 'f4'),)
  )
  segment = MooncakeSegment('mooncake', config, BLOCK, 1 << 40)
  times_s: dict[str, list[float]] = {'put': [], 'get': []}
  for number in range(repeats + config.staging_blocks):  # uses every slot once
    replica = Replica('mooncake', number, number.to_bytes(32, 'big'))
    start_s = time.perf_counter()
    segment.store(replica, part)
    put_s = time.perf_counter()
    segment.read(replica, (0, BLOCK.num_layers))
    times_s['get'].append(time.perf_counter() - put_s)
    times_s['put'].append(put_s - start_s)
    segment.remove([replica.key], force=True)
  segment.close()
  return [
    Row(
      f'mooncake.{way}.segment.{num_bytes // MIB}MiB.{what}_bytes_per_s',
      num_bytes / min(times[config.staging_blocks :]),
      'B/s',
      'gather and seal, or check, included',
    )
    for what, times in times_s.items()
  ]


class Store:
  """A client that calls from this thread."""

  def __init__(self, config: MooncakeConfig):
    """Joins and fills the store once."""
    self._client = MooncakeClient(config, ARENA_BYTES)
    self._client.memory[:] = 1
    self._numbers = itertools.count()
    jobs = []
    for _ in range(STORE_BYTES * 3 // 4 // (8 * MIB)):
      jobs += self._jobs(self._client.put, 8 * MIB, 1)
      self._client.put(jobs[-1:])
    self._client.remove_now(jobs)

  def rows(self, way: str, sizes: dict[str, int], repeats: int) -> list[Row]:
    """Single and batched puts and gets of each size."""
    return [
      row
      for name, num_bytes in sizes.items()
      for count in sorted({1, min(BATCH, ARENA_BYTES // num_bytes)})
      for row in self._size(f'mooncake.{way}.{name}', num_bytes, count, repeats)
    ]

  def close(self) -> None:
    self._client.close(lambda: True)

  def _size(
    self, name: str, num_bytes: int, count: int, repeats: int
  ) -> list[Row]:
    client, times_s = self._client, {'put': [], 'get': []}
    for _ in range(repeats + 1):
      jobs = self._jobs(client.put, num_bytes, count)
      times_s['put'].append(seconds_of(client.put, jobs, 0))
      times_s['get'].append(seconds_of(client.get, jobs, num_bytes))
      client.remove_now(jobs)
    return [
      Row(
        f'{name}.{what}_bytes_per_s' + (f'.x{count}' if count > 1 else ''),
        num_bytes * count / min(times[1:]),
        'B/s',
        'all buffers warm',
      )
      for what, times in times_s.items()
    ]

  def _jobs(
    self, run: Callable[[list[Job]], list[int]], num_bytes: int, count: int
  ) -> list[Job]:
    return [
      Job(
        run,
        f'bench{next(self._numbers)}',
        self._client.memory[i * num_bytes : (i + 1) * num_bytes],
        0.0,
      )
      for i in range(count)
    ]
