# SPDX-License-Identifier: Apache-2.0
"""The same bytes moved by the plainest means, to stand beside ours.

All memory is touched before the clock runs. Sources are as many bytes as what
it is compared with, so caches hold none of them; what a get brought is freed
for the next, which may find it in a cache: that favours the plain means.
"""

from collections import deque
import mmap
import os
from pathlib import Path
import time

import jax
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding
import numpy as np


class Bare:
  """Blocks as plain arrays, put and got by `device_put` alone."""

  def __init__(self, num_bytes: int, num_sources: int, room: int):
    """Makes the sources; `room` is how many blocks are retained."""
    device = jax.devices()[0]
    self._device = SingleDeviceSharding(device, memory_kind='device')
    self._host = SingleDeviceSharding(device, memory_kind='pinned_host')
    self._pool = [
      jnp.full(num_bytes // 4, i, 'float32') for i in range(num_sources)
    ]
    self._room = room
    self._next = 0
    self.held: deque[jax.Array] = deque()

  @property
  def is_full(self) -> bool:
    return len(self.held) == self._room

  def put(self, count: int) -> float:
    """Seconds to let go of the oldest if full, and to put others."""
    start_s = time.perf_counter()
    for _ in range(len(self.held) + count - self._room):
      self.held.popleft()
    sources = [self._pool[self._at(i)] for i in range(count)]
    self.held += jax.block_until_ready(jax.device_put(sources, self._host))
    seconds = time.perf_counter() - start_s
    self._next += count
    return seconds

  def get(self, turn: int, count: int) -> float:
    """Seconds to bring held blocks to the device; they are dropped again."""
    n = len(self.held)
    start_s = time.perf_counter()
    blocks = [self.held[(7 * turn * count + i) % n] for i in range(count)]
    jax.block_until_ready(jax.device_put(blocks, self._device))
    return time.perf_counter() - start_s

  def _at(self, i: int) -> int:
    return (self._next + i) % len(self._pool)


class Memcpy:
  """Warm buffers, copied from a source in turn."""

  def __init__(self, num_bytes: int, num_buffers: int):
    self._source = [
      np.full(num_bytes // 4, i, 'f4') for i in range(num_buffers)
    ]
    self._target = [np.zeros_like(source) for source in self._source]
    self._next = 0

  def copy(self, count: int) -> float:
    """Seconds of so many blocks."""
    start_s = time.perf_counter()
    for _ in range(count):
      self._next = (self._next + 1) % len(self._source)
      np.copyto(self._target[self._next], self._source[self._next])
    return time.perf_counter() - start_s


def write_file(path: Path, block: np.ndarray) -> float:
  """Seconds to write an array to a new file, as it is, without a checksum."""
  start_s = time.perf_counter()
  with open(path, 'wb', buffering=0) as file:
    left = memoryview(block.view(np.uint8))  # type: ignore
    while left:
      left = left[file.write(left) :]
  return time.perf_counter() - start_s


def read_file(path: Path, warm: np.ndarray | None) -> float:
  """Seconds to read it into `warm`, or into memory mapped anew."""
  start_s = time.perf_counter()
  with open(path, 'rb', buffering=0) as file:
    size = os.fstat(file.fileno()).st_size
    left = memoryview(
      mmap.mmap(-1, size) if warm is None else warm.view(np.uint8)  # type: ignore
    )
    while left and (got := file.readinto(left)):
      left = left[got:]
  return time.perf_counter() - start_s
