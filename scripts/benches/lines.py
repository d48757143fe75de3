# SPDX-License-Identifier: Apache-2.0
"""KVCache through a line of 1 Gbit/s, and how long it was expected to take.

The line is between two network namespaces. What is expected is what an
instance measures as it starts, by a few parts; see `distributed/probe.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
import os
from statistics import median
from typing import get_args

from mooncake_jax.distributed.spec import MoverName
from mooncake_jax.transfer.host_memory import keep_freed_memory
from scripts.benches.namespaces import hosts
from scripts.benches.namespaces import why_not
from scripts.benches.rows import Row
from scripts.benches.wires import HERE
from scripts.benches.wires import ours
from scripts.benches.wires import Place

PIECE_BYTES = 1 << 20
COUNTS = (1, 3, 6, 16)  # pieces of a transfer; most are none that it measures
LINE_BITS_PER_S = 1e9
LINE_SHARE = 0.9
PREDICTED_OFF = 0.2
# JAX's transfer server has one network thread a process, which stays where the
# first server was started.
MOVERS: tuple[MoverName, ...] = ('tcp', 'nixl')


def lines(quick: bool) -> Iterator[Row]:
  """Shares of a slow line, and how far off what was measured is."""
  keep_freed_memory()  # as workers do
  turns = 7 if quick else 15
  for mover in get_args(MoverName):
    yield from _predicted(mover, HERE, turns)
  if why := why_not():
    for mover in MOVERS:
      yield Row(f'line.{mover}_share', None, 'ratio', why, LINE_SHARE)
    return
  with hosts(2, LINE_BITS_PER_S) as (near, far), _environment(UCX_TLS='tcp'):
    for mover in MOVERS:
      yield from _predicted(mover, Place(near, far), turns)


def _predicted(mover: MoverName, place: Place, turns: int) -> Iterator[Row]:
  name = f'{"wire" if place is HERE else "line"}.{mover}'
  with ours(mover, PIECE_BYTES, place) as way:
    speed = way.measured()
    rounds = [[way.seconds(count) for count in COUNTS] for _ in range(turns)]
  each_s = map(median, zip(*rounds))
  took_s = {count: count * seconds for count, seconds in zip(COUNTS, each_s)}
  if place is not HERE:
    count = COUNTS[-1]
    share = count * PIECE_BYTES * 8 / LINE_BITS_PER_S / took_s[count]
    why = f'of {LINE_BITS_PER_S:.0e} bits/s, {count} MiB at once'
    yield Row(f'{name}_share', share, 'ratio', why, LINE_SHARE)
  off = {
    count: speed.transfer_s(count * PIECE_BYTES) / seconds - 1
    for count, seconds in took_s.items()
  }
  told = ', '.join(f'{count} MiB {each:+.0%}' for count, each in off.items())
  latency_ms, gb_per_s = 1e3 * speed.latency_s, speed.bytes_per_s / 1e9
  yield Row(
    f'{name}_predicted_off',
    max(map(abs, off.values())),
    'ratio',
    f'{latency_ms:.2f} ms, {gb_per_s:.3f} GB/s: {told}',
    PREDICTED_OFF,
    at_most=True,
  )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
  """For programs that are started, and libraries that are loaded, meanwhile."""
  before = {**os.environ}
  os.environ.update(values)
  for name in ('UCX_NET_DEVICES',):
    os.environ.pop(name, None)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)
