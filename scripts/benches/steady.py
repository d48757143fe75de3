# SPDX-License-Identifier: Apache-2.0
"""Puts and gets of a full host segment against bare device_put, in one loop.

Each turn evicts the oldest blocks and puts others in their place, then gets
some; a list of plain arrays does the same by `device_put`. Both hold 1 GiB of
blocks, written once before the clock runs, in memory that malloc keeps (see
`host_memory.py`): no page is touched first meanwhile, on either side.
"""

from collections import deque
from statistics import median
import time

import jax
from jax import numpy as jnp
from jax.sharding import SingleDeviceSharding

from mooncake_jax.backend import Replica
from scripts.benches.model import CONFIG
from scripts.benches.rows import Row
from scripts.benches.transfers import Blocks
from scripts.benches.transfers import blocks_of
from scripts.benches.transfers import NAME

HELD_BYTES = 1 << 30
# (block tokens, parts a block, blocks a transfer): 5.9, 23.6 and 70.8 MB.
CASES = ((128, 3, 4), (128, 1, 4), (512, 1, 4), (1536, 1, 1))
SUBMIT_S = 0.5e-3


def steady(quick: bool) -> list[Row]:
  """Ratios to bare device_put, and how soon `transfer` returns."""
  rows = []
  for tokens, parts, depth in CASES:
    with blocks_of(tokens, parts, host_bytes=HELD_BYTES) as blocks:
      rows += _case(blocks, parts, depth, 10 if quick else 40)
  with blocks_of(128, 3, host_bytes=HELD_BYTES) as blocks:
    for num_ops in (1, 24):
      rows.append(_submit(blocks, num_ops))
  return rows


class Bare:
  """The same blocks as plain arrays, put and got by `device_put` alone."""

  def __init__(self, blocks: Blocks):
    device = jax.devices()[0]
    self._device = SingleDeviceSharding(device, memory_kind='device')
    self._host = SingleDeviceSharding(device, memory_kind='pinned_host')
    S, K, H = blocks.layout.block_size_tokens, CONFIG.num_kv_heads, 64
    block = jnp.ones((CONFIG.num_layers, 2, S, K, H))
    self._sources = [jnp.copy(block) for _ in range(min(blocks.num_blocks, 16))]
    self.held: deque[jax.Array] = deque()

  def put(self, first: int, count: int, is_full: bool) -> float:
    start_s = time.perf_counter()
    for _ in range(count if is_full else 0):
      self.held.popleft()
    n = len(self._sources)
    sources = [self._sources[(first + i) % n] for i in range(count)]
    self.held += jax.block_until_ready(jax.device_put(sources, self._host))
    return time.perf_counter() - start_s

  def get(self, positions: list[int]) -> float:
    start_s = time.perf_counter()
    blocks = [self.held[i] for i in positions]
    jax.block_until_ready(jax.device_put(blocks, self._device))
    return time.perf_counter() - start_s


def _case(blocks: Blocks, parts: int, depth: int, turns: int) -> list[Row]:
  bare, held = Bare(blocks), deque()
  room = HELD_BYTES // blocks.layout.block_bytes
  times: dict[str, list[float]] = {'put': [], 'get': []}
  bare_times: dict[str, list[float]] = {'put': [], 'get': []}
  for turn in range(room // depth + turns):
    first, is_full = turn * depth, len(held) + depth > room
    put_s = _put(blocks, held, first, depth, is_full)
    bare_put_s = bare.put(first, depth, is_full)
    at = [(7 * first + i) % len(held) for i in range(depth)]
    get_s = _get(blocks, [held[i] for i in at], first)
    bare_get_s = bare.get(at)
    if is_full:
      times['put'].append(put_s)
      times['get'].append(get_s)
      bare_times['put'].append(bare_put_s)
      bare_times['get'].append(bare_get_s)
  blocks.backend.drop(tuple(held))
  num_bytes = depth * blocks.layout.block_bytes
  rows = []
  for way in ('put', 'get'):
    size = blocks.layout.block_bytes / 1e6
    name = f'steady.{way}.{depth}x{size:.0f}MB_in_{parts}'
    best_s, bare_s = min(times[way]), min(bare_times[way])
    asked = 0.85 if parts == 1 else None
    rows += [
      Row(f'{name}.bytes_per_s', num_bytes / best_s, 'B/s', 'pool full'),
      Row(f'{name}.bare_bytes_per_s', num_bytes / bare_s, 'B/s', 'device_put'),
      Row(
        f'{name}.device_put_share',
        bare_s / best_s,
        'ratio',
        'bare device_put in the same loop, best turns',
        target=asked,
      ),
    ]
  return rows


def _put(
  blocks: Blocks, held: deque[Replica], first: int, count: int, is_full: bool
) -> float:
  """Seconds to evict `count` blocks, if it is full, and put as many."""
  start_s = time.perf_counter()
  gone = [held.popleft() for _ in range(count if is_full else 0)]
  blocks.backend.drop(tuple(gone))
  new = [Replica(NAME, first + i) for i in range(count)]
  blocks.move(
    op
    for i, replica in enumerate(new)
    for op in blocks.ops(blocks.pages(first + i), replica)
  )
  held.extend(new)
  return time.perf_counter() - start_s


def _get(blocks: Blocks, replicas: list[Replica], first: int) -> float:
  start_s = time.perf_counter()
  blocks.move(
    op
    for i, replica in enumerate(replicas)
    for op in blocks.ops(replica, blocks.pages(first + i))
  )
  return time.perf_counter() - start_s


def _submit(blocks: Blocks, num_ops: int) -> Row:
  """How long the caller of `transfer` is held up while bytes move."""
  returned = []
  for turn in range(30):
    ops = [
      op
      for i in range(-(-num_ops // 3))
      for op in blocks.ops(blocks.pages(i), Replica(NAME, 1000 * turn + i))
    ][:num_ops]
    returned.append(blocks.move(ops)[1])
    blocks.backend.drop(tuple({op.dst for op in ops}))  # type: ignore
  return Row(
    f'steady.submit_{num_ops}_ops.s',
    median(returned),
    's',
    'median of 30',
    target=SUBMIT_S,
    at_most=True,
  )
