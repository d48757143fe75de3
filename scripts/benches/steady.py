# SPDX-License-Identifier: Apache-2.0
"""Puts and gets of a full store, against bare means in the same loop.

Client, Master and transfer engine as serving uses them (`cycle.py`). Each
turn puts other blocks where the oldest were evicted and gets some that are
held; plain arrays do the same by `device_put`, warm buffers by memcpy, and a
real Mooncake Store and LMCache, where installed, by their batched calls. Each
holds more than 1 GiB of distinct blocks and puts them from 512 MiB of device
memory. All of it was written before the clock runs, in memory that
malloc keeps (`host_memory.py`); turns that touched new pages all the same are
left out, on every side. The median turn counts.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from resource import getrusage
from resource import RUSAGE_SELF
from statistics import median
import sys

from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from scripts.benches.bare import Bare
from scripts.benches.bare import Memcpy
from scripts.benches.cycle import Cycle
from scripts.benches.lmcache import LMCache
from scripts.benches.lmcache import lmcache_program
from scripts.benches.lmcache import missing_rows
from scripts.benches.lmcache import TorchCopy
from scripts.benches.model import CONFIG
from scripts.benches.real import real_clients
from scripts.benches.real import RealStore
from scripts.benches.rows import Row
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import blocks_of
from scripts.benches.turns import Turns

CAPACITY_BYTES = 5 << 28  # of our segment, which stays above 90 % full
HELD_BYTES = 9 << 27  # of the others: 1.125 GiB
ALL, DEFAULT = CONFIG.num_layers, ClusterSpec().layers_per_transfer
# (tokens a block, layers a part, blocks a transfer): 5.9 and 23.6 MB blocks.
CASES = ((128, DEFAULT, 4), (128, ALL, 4), (128, ALL, 16), (512, ALL, 4))
TOKEN_BYTES = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4 * ALL
SHARE = 0.85
TIMES = 2.0

PAGE_BYTES = 4096

Others = Mapping[str, Bare | RealStore | LMCache | TorchCopy]


def steady(quick: bool, cases=CASES) -> list[Row]:
  """Ratios to bare device_put and to the real store, by case."""
  call_bytes = max(tokens * batch for tokens, _, batch in cases) * TOKEN_BYTES
  with (
    real_clients(HELD_BYTES, call_bytes) as clients,
    lmcache_program(HELD_BYTES) as lmcache,
  ):
    rows = missing_rows('steady', lmcache)
    for tokens, layers, batch in cases:
      with blocks_of(tokens, layers, host_bytes=CAPACITY_BYTES) as blocks:
        blocks.fill()
        cycle = Cycle(blocks, CAPACITY_BYTES, batch)
        with others_of(blocks, clients, lmcache, HELD_BYTES) as others:
          times = measured(cycle, others, 1, 10 if quick else 40)
        rows += _rows(blocks, layers, batch, times)
  return rows


@contextmanager
def others_of(
  blocks: Blocks,
  clients: Mapping[str, MooncakeClient],
  lmcache: Turns | None,
  held_bytes: int,
) -> Iterator[Others]:
  """Other means, by way, that hold so many bytes of the same blocks."""
  size = blocks.layout.block_bytes
  room = held_bytes // size
  real = {way: RealStore(c, size, room) for way, c in clients.items()}
  others: Others = {
    'device_put': Bare(size, blocks.num_blocks, room),
    **real,
    **_lmcache_of(lmcache, size, blocks.num_blocks, room),
  }
  most = min((c.memory.size // size for c in clients.values()), default=room)
  for other in others.values():
    while not other.is_full:
      other.put(min(most, room - len(other.held)))
  yield others
  for other in others.values():
    if isinstance(other, LMCache):
      other.check()
  for store in real.values():
    store.clear()


def _lmcache_of(
  program: Turns | None, size: int, num_sources: int, room: int
) -> dict[str, LMCache | TorchCopy]:
  if program is None:
    return {}
  return {
    'lmcache': LMCache(program, size, num_sources, room),
    'torch_copy': TorchCopy(program),
  }


def measured(
  cycle: Cycle, others: Others, depth: int, turns: int
) -> dict[tuple[str, str], float]:
  """Seconds of the median turn by ('put' or 'get', way).

  A turn moves `depth` chains: ours in as many transfers, the others in one
  call.
  """
  count, size = cycle.batch * depth, cycle.blocks.layout.block_bytes
  memcpy = Memcpy(size, max(HELD_BYTES // 8 // size, 2))
  while not cycle.blocks_evicted:
    cycle.put(depth)
  times = Warm(count * size)
  for turn in range(3 * turns):
    works = {
      ('put', 'store'): partial(cycle.put, depth),
      ('get', 'store'): partial(cycle.get, turn, depth),
      ('put', 'memcpy'): partial(memcpy.copy, count),
    }
    for way, other in others.items():
      works['put', way] = partial(other.put, count)
      works['get', way] = partial(other.get, turn, count)
    for key in [*works][:: 1 if turn % 2 else -1]:
      times.take(key, works[key])
    if times.least(works) > turns:
      break
  cycle.check()
  found = times.medians()
  return found | {('get', 'memcpy'): found['put', 'memcpy']}


class Warm:
  """Times of turns that touched no memory first, by (what, way).

  malloc mixes all sides' blocks and now and then takes new memory for one; its
  page faults, 1 GB/s, are nobody's doing.
  """

  def __init__(self, num_bytes: int):
    """`num_bytes` is what a turn moves."""
    self._most_faults = 8 + num_bytes // PAGE_BYTES // 50
    self._warm: dict[tuple[str, str], list[float]] = {}
    self._all: dict[tuple[str, str], list[float]] = {}

  def take(self, key: tuple[str, str], work: Callable[[], float]) -> None:
    """Adds what `work` took."""
    before = getrusage(RUSAGE_SELF).ru_minflt
    seconds = work()
    faults = getrusage(RUSAGE_SELF).ru_minflt - before
    self._all.setdefault(key, []).append(seconds)
    if faults <= self._most_faults:
      self._warm.setdefault(key, []).append(seconds)

  def least(self, keys: Iterable[tuple[str, str]]) -> int:
    """Warm turns of the key that has fewest."""
    return min(len(self._warm.get(key, ())) for key in keys)

  def medians(self) -> dict[tuple[str, str], float]:
    """Of the warm turns but the first; of all where there are too few."""
    found = {}
    for key, taken in self._all.items():
      warm = self._warm.get(key, [])[1:]
      if not warm:
        print(f'{key}: no turn was warm', file=sys.stderr)
      found[key] = median(warm or taken)
    return found


def _rows(
  blocks: Blocks, layers: int, batch: int, times: dict[tuple[str, str], float]
) -> list[Row]:
  num_bytes = batch * blocks.layout.block_bytes
  size, parts = blocks.layout.block_bytes / 1e6, -(-ALL // layers)
  rows = []
  for what in ('put', 'get'):
    name = f'steady.{what}.{batch}x{size:.0f}MB_in_{parts}'
    taken = {way: s for (w, way), s in times.items() if w == what}
    for way, seconds in taken.items():
      speed = num_bytes / seconds
      note = 'pool full, client + Master + engine' if way == 'store' else ''
      rows.append(Row(f'{name}.{way}.bytes_per_s', speed, 'B/s', note))
    for way, seconds in taken.items():
      if way != 'store':
        rows.append(_ratio(name, way, seconds / taken['store'], layers))
  return rows


def _ratio(name: str, way: str, ratio: float, layers: int) -> Row:
  targets = {'device_put': SHARE, 'tcp': TIMES}
  asked = targets.get(way) if layers == ALL else None
  note = 'default parts' if layers != ALL else 'all layers in one part'
  return Row(f'{name}.of_{way}', ratio, 'ratio', f'median turns; {note}', asked)
