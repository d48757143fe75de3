# SPDX-License-Identifier: Apache-2.0
"""LMCache's host memory backend; runs in the peer's own environment.

python scripts/peers/lmcache_turns.py '{"threads": 2, "pool_bytes": 1000000000}'

Blocks are numbered by the caller. A put allocates, copies in and publishes, as
LMCache's engine does; a get takes a handle and copies out.
"""

from contextlib import closing
from importlib import metadata
import json
import sys
import time

from turns import Child  # of this folder


class Program:
  """A storage manager with its host memory backend alone."""

  def __init__(self, torch, storage, memory_format):
    self._torch = torch
    self._storage = storage
    self._format = memory_format

  def make(self, floats: int, num_sources: int, num_targets: int) -> None:
    """Forgets all blocks; new ones have so many float32 numbers each."""
    torch = self._torch
    self._storage.clear()
    self._shape = torch.Size([2, 1, 1, floats // 2])
    self._sources = [
      torch.full(self._shape, float(i)) for i in range(num_sources)
    ]
    self._targets = [torch.zeros(self._shape) for _ in range(num_targets)]

  def put(self, numbers: list[int], old: list[int]) -> dict[str, float]:
    """Seconds to put blocks; `old` ones are removed before."""
    storage, put = self._storage, self._put
    for number in old:
      storage.remove(self._key(number))
    start_s = time.perf_counter()
    keys = [self._key(number) for number in numbers]
    storage.batched_put(keys, [put(number) for number in numbers])
    return {'seconds': time.perf_counter() - start_s}

  def get(self, numbers: list[int]) -> dict[str, float]:
    """Seconds to copy blocks out."""
    start_s = time.perf_counter()
    for i, number in enumerate(numbers):
      block = self._storage.get(self._key(number))
      self._targets[i % len(self._targets)].copy_(block.tensor)
      block.ref_count_down()
    return {'seconds': time.perf_counter() - start_s}

  def copy(self, numbers: list[int]) -> dict[str, float]:
    """Seconds of the same copies without a store."""
    start_s = time.perf_counter()
    for i, number in enumerate(numbers):
      source = self._sources[number % len(self._sources)]
      self._targets[i % len(self._targets)].copy_(source)
    return {'seconds': time.perf_counter() - start_s}

  def verify(self, number: int) -> dict[str, bool]:
    """Whether a block still has the bytes it was put with."""
    block = self._storage.get(self._key(number))
    expected = float(number % len(self._sources))
    right = bool((block.tensor == expected).all())
    block.ref_count_down()
    return {'right': right}

  def _put(self, number: int):
    block = self._storage.allocate(
      self._shape, self._torch.float32, fmt=self._format
    )
    block.tensor.copy_(self._sources[number % len(self._sources)])
    return block

  def _key(self, number: int):
    from lmcache.utils import CacheEngineKey  # pyright: ignore[reportMissingImports]

    return CacheEngineKey('model', 1, 0, number, self._torch.float32)


def make_storage(torch, pool_bytes: int):
  """A storage manager without a GPU, whose pool is allocated at once."""
  from lmcache.v1.config import LMCacheEngineConfig  # pyright: ignore[reportMissingImports]
  from lmcache.v1.event_manager import EventManager  # pyright: ignore[reportMissingImports]
  from lmcache.v1.metadata import LMCacheMetadata  # pyright: ignore[reportMissingImports]
  from lmcache.v1.storage_backend.storage_manager import StorageManager  # pyright: ignore[reportMissingImports]

  config = LMCacheEngineConfig.from_defaults(
    local_cpu=True, max_local_cpu_size=pool_bytes / 2**30
  )
  about = LMCacheMetadata(
    model_name='model',
    world_size=1,
    local_world_size=1,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.float32,
    kv_shape=(1, 2, config.chunk_size, 1, 64),
  )
  return StorageManager(config, about, EventManager())


def main(threads: int, pool_bytes: int) -> None:
  child = Child(threads)
  import torch  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(threads)
  from lmcache.v1.memory_management import MemoryFormat  # pyright: ignore[reportMissingImports]

  with closing(make_storage(torch, pool_bytes)) as storage:
    program = Program(torch, storage, MemoryFormat.KV_2LTD)
    works = ('make', 'put', 'get', 'copy', 'verify')
    child.answer(
      {work: getattr(program, work) for work in works},
      f'lmcache {metadata.version("lmcache")}, torch {torch.__version__}',
    )


if __name__ == '__main__':
  main(**json.loads(sys.argv[1]))
