# SPDX-License-Identifier: Apache-2.0
"""The Master at a million keys: calls a second and bytes a key.

Batched by chain, as serving calls it: a request's blocks in one call. Rates
are per second of this thread's processor time, so that what else the machine
does is left out; the garbage collector runs as always.
"""

import gc
import time
import tracemalloc

from mooncake_jax.store.master import Master
from scripts.benches.rows import Row

CHAIN_BLOCKS = 100
BLOCK_BYTES = 4 << 20
SEGMENT = 'host'

Chains = list[tuple[bytes, ...]]


def master(quick: bool) -> list[Row]:
  """Puts into an empty segment, leased gets of all, puts into a full one."""
  num_keys = 100_000 if quick else 1_000_000
  per_key = _bytes_per_key(100_000)
  chains = _chains(0, num_keys)
  made = _make(num_keys)
  name = f'master.{num_keys // 1000}k'
  put_s = _put_all(made, chains, 0.0)
  get_s = _get_all(made, chains, 1.0)
  later = _chains(num_keys, num_keys // 2)
  full_s = _put_all(made, later, 100.0)
  evicted = made.statistics().counts.evicted_blocks
  assert evicted == len(later) * CHAIN_BLOCKS, evicted
  unit, batch = '1/s', f'one core, chains of {CHAIN_BLOCKS}'
  return [
    Row(f'{name}.put_cycles', num_keys / put_s, unit, batch, target=250e3),
    Row(f'{name}.leased_gets', num_keys / get_s, unit, batch, target=500e3),
    Row(f'{name}.put_cycles_evicting', evicted / full_s, unit, batch),
    Row(
      'master.bytes_per_key',
      per_key,
      'B',
      'tracemalloc, 32-byte key included, after a get',
      target=500,
      at_most=True,
    ),
  ]


def _chains(first: int, num_keys: int) -> Chains:
  """Chains of distinct 32-byte keys."""
  return [
    tuple(i.to_bytes(32, 'big') for i in range(at, at + CHAIN_BLOCKS))
    for at in range(first, first + num_keys, CHAIN_BLOCKS)
  ]


def _make(num_keys: int) -> Master:
  made = Master(high_watermark=1.0, eviction_ratio=0.0)
  made.mount(SEGMENT, num_keys * BLOCK_BYTES)
  return made


def _put_all(made: Master, chains: Chains, now_s: float) -> float:
  start_s = time.thread_time()
  for chain in chains:
    put = made.put_start_chain(
      chain, 0, CHAIN_BLOCKS, BLOCK_BYTES, SEGMENT, now_s
    )
    made.put_end_chain(put.replicas)
  return time.thread_time() - start_s


def _get_all(made: Master, chains: Chains, now_s: float) -> float:
  start_s = time.thread_time()
  found = 0
  for chain in chains:
    found += len(made.get_chain(chain, now_s, SEGMENT))
  seconds = time.thread_time() - start_s
  assert found == len(chains) * CHAIN_BLOCKS, found
  return seconds


def _bytes_per_key(num_keys: int) -> float:
  gc.collect()
  tracemalloc.start()
  before = tracemalloc.get_traced_memory()[0]
  made, chains = _make(num_keys), _chains(0, num_keys)
  for i, chain in enumerate(chains):
    _put_all(made, [chain], i)
    _get_all(made, [chain], i)
  after = tracemalloc.get_traced_memory()[0]
  tracemalloc.stop()
  return (after - before) / num_keys
