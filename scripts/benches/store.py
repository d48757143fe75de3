# SPDX-License-Identifier: Apache-2.0
"""Blocks through the store, by size, batch and queue depth.

Client, Master and transfer engine, full, beside `device_put`, memcpy, a real
Mooncake Store and LMCache in the same loop (`steady.py`), all 512 MiB. A turn's
blocks are one call of each of these.
"""

from scripts.benches.cycle import Cycle
from scripts.benches.lmcache import lmcache_program
from scripts.benches.lmcache import missing_rows
from scripts.benches.real import real_clients
from scripts.benches.rows import Row
from scripts.benches.steady import measured
from scripts.benches.steady import others_of
from scripts.benches.sweep import modes
from scripts.benches.sweep import MOVED_BYTES
from scripts.benches.sweep import rows_of
from scripts.benches.sweep import sizes
from scripts.benches.sweep import small_blocks

HELD_BYTES = 512 << 20
CAPACITY_BYTES = 5 << 27


def store(quick: bool) -> list[Row]:
  """Bytes a second of each means, none with a target."""
  with (
    real_clients(HELD_BYTES, MOVED_BYTES) as clients,
    lmcache_program(HELD_BYTES) as lmcache,
  ):
    rows = missing_rows('store', lmcache)
    for name, size in sizes(quick).items():
      with small_blocks(size, host_bytes=CAPACITY_BYTES) as blocks:
        with others_of(blocks, clients, lmcache, HELD_BYTES) as others:
          for mode in modes(quick, size):
            cycle = Cycle(blocks, CAPACITY_BYTES, mode[0])
            times = measured(cycle, others, mode[1], 5 if quick else 20)
            cycle.clear()
            rows += rows_of('store', name, size, mode, times)
  return rows
