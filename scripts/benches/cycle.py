# SPDX-License-Identifier: Apache-2.0
"""Puts and gets as serving makes them: client, Master, transfer engine.

A put asks the Master for room, drops what it evicts, moves and publishes; a
get takes leases, moves and checks them. Blocks are numbered; block i has the
bytes of pool block i modulo their number, so what arrives can be checked.
"""

import time

import numpy as np

from mooncake_jax.backend import DevicePages
from mooncake_jax.request import BlockKey
from mooncake_jax.store.client import StoreClient
from mooncake_jax.store.master import Master
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import NAME

# The Master's clock counts puts, and a lease runs to the next: in the 10 s of
# serving a loop that does nothing but read would lease all there is.
LEASE_S = 1.0


class Cycle:
  """One instance's host segment behind a Master.

  A put makes chains of `batch` blocks, one transfer each; a get reads them
  whole. Keys and pages are there before: whoever serves has them.
  """

  def __init__(self, blocks: Blocks, capacity_bytes: int, batch: int):
    """Begins with nothing stored."""
    self.blocks = blocks
    self.master = Master(LEASE_S)
    self.master.mount(NAME, capacity_bytes)
    self.client = StoreClient(self.master, blocks.layout)
    self.batch = batch
    self.held: dict[int, None] = {}  # first blocks of chains, oldest first
    self._next = 0
    self._now_s = 0.0
    self.blocks_evicted = 0

  def put(self, depth: int) -> float:
    """Seconds to put `depth` chains, all under way at once."""
    self._now_s += 1.0
    backend, puts = self.blocks.backend, {}
    firsts = range(self._next, self._next + depth * self.batch, self.batch)
    self._next = firsts.stop
    asked = [(i, self._chain(i), self._pages(i)) for i in firsts]
    start_s = time.perf_counter()
    for first, keys, pages in asked:
      put = self.client.put(keys, 0, self.batch, NAME, pages, self._now_s)
      if put.stop < self.batch:
        raise RuntimeError('a measured put found no room')
      backend.drop(tuple(e.replica for e in put.evicted))
      puts[backend.transfer(put.ops, 0, float('inf'))] = (first, put)
    while completions := backend.wait(None):
      for completion in completions:
        first, put = puts[completion.work_id]
        if self.client.put_done(put.replicas, completion)[1]:
          raise RuntimeError(f'a measured put failed: {completion.error}')
    seconds = time.perf_counter() - start_s
    self._keep_books(puts.values())
    return seconds

  def get(self, turn: int, depth: int) -> float:
    """Seconds to read chains, others each turn, all under way at once."""
    there = [*self.held]
    firsts = [there[(7 * turn + i) % len(there)] for i in range(depth)]
    backend, gets = self.blocks.backend, {}
    asked = [(self._chain(i), self._pages(i)) for i in firsts]
    start_s = time.perf_counter()
    for keys, pages in asked:
      held = self.client.hold_prefix(keys, NAME, 0, None, self._now_s)
      ops = self.client.get_ops(held, NAME, pages.pages)
      gets[backend.transfer(ops, 0, float('inf'))] = held
    arrived = 0
    while completions := backend.wait(None):
      for completion in completions:
        held = gets[completion.work_id]
        arrived += self.client.arrived(held, completion)[0]
    seconds = time.perf_counter() - start_s
    if arrived != depth * self.batch:
      raise RuntimeError(f'a measured get brought {arrived} blocks')
    return seconds

  def clear(self) -> None:
    """Drops all that is held."""
    for key in self.master.inventory(NAME):
      self.blocks.backend.drop(self.master.peek(key))
    self.held = {}

  def check(self) -> None:
    """Raises RuntimeError if a block that is held has not its bytes."""
    segment = self.blocks.backend.instances[NAME].segment
    for first in self.held:
      for number in range(first, first + self.batch):
        (replica,) = self.master.peek(number.to_bytes(32, 'big'))
        layers = self.blocks.layout.num_layers
        for part in segment.read(replica.replica_id, 0, layers):
          if np.any(
            np.asarray(part.slices[0])[:, :, ::16] != self._fill(number)
          ):
            raise RuntimeError(f'block {number} has other bytes')

  def _fill(self, number: int) -> int:
    return number % self.blocks.num_blocks

  def _chain(self, first: int) -> tuple[BlockKey, ...]:
    numbers = range(first, first + self.batch)
    return tuple(number.to_bytes(32, 'big') for number in numbers)

  def _pages(self, first: int) -> DevicePages:
    pages: tuple[int, ...] = ()
    for number in range(first, first + self.batch):
      pages += self.blocks.pages(number).pages
    return DevicePages(NAME, pages)

  def _keep_books(self, puts) -> None:
    for first, put in puts:
      self.held[first] = None
      self.blocks_evicted += len(put.evicted)
      for evicted in put.evicted:
        number = int.from_bytes(evicted.key, 'big')
        self.held.pop(number - number % self.batch, None)
