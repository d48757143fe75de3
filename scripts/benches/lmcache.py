# SPDX-License-Identifier: Apache-2.0
"""LMCache's host memory backend in the same loop, in its own interpreter.

See `scripts/peers/lmcache_turns.py`. Its pool is filled before the clock runs
and the oldest blocks go outside the time, so it never evicts by itself.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
import itertools
import os

from scripts.benches.rows import Row
from scripts.benches.turns import interpreter
from scripts.benches.turns import peer
from scripts.benches.turns import Turns

NAME = 'lmcache'
SPARE = 1.25  # of what is held


class LMCache:
  """Blocks of LMCache, each `num_bytes`, at most `room` of them."""

  def __init__(
    self, program: Turns, num_bytes: int, num_sources: int, room: int
  ):
    self._program = program
    self._room = room
    self._numbers = itertools.count()
    self.held: deque[int] = deque()
    num_targets = max(room // 8, 1)
    program.ask(
      'make',
      floats=num_bytes // 4,
      num_sources=num_sources,
      num_targets=num_targets,
    )

  @property
  def is_full(self) -> bool:
    return len(self.held) == self._room

  def put(self, count: int) -> float:
    """Seconds of a put of other blocks, in its process."""
    num_old = len(self.held) + count - self._room
    old = [self.held.popleft() for _ in range(num_old)]
    numbers = [*itertools.islice(self._numbers, count)]
    self.held += numbers
    return self._program.ask('put', numbers=numbers, old=old)['seconds']

  def get(self, turn: int, count: int) -> float:
    """Seconds of a get of held blocks, others each turn."""
    return self._program.ask('get', numbers=self._some(turn, count))['seconds']

  def check(self) -> None:
    """Raises RuntimeError unless the oldest and newest have their bytes."""
    for number in (self.held[0], self.held[-1]):
      if not self._program.ask('verify', number=number)['right']:
        raise RuntimeError(f'{self._program.name}: block {number} is wrong')

  def _some(self, turn: int, count: int) -> list[int]:
    n = len(self.held)
    return [self.held[(7 * turn * count + i) % n] for i in range(count)]


class TorchCopy:
  """The same bytes copied in LMCache's process without LMCache."""

  is_full = True
  held: tuple[()] = ()

  def __init__(self, program: Turns):
    self._program = program
    self._next = 0

  def put(self, count: int) -> float:
    """Seconds of as many blocks."""
    numbers = [*range(self._next, self._next + count)]
    self._next += count
    return self._program.ask('copy', numbers=numbers)['seconds']

  def get(self, turn: int, count: int) -> float:
    """The same: a copy has no direction."""
    return self.put(count)


@contextmanager
def lmcache_program(held_bytes: int) -> Iterator[Turns | None]:
  """LMCache with room for `held_bytes`; None where it is not installed."""
  if not interpreter(NAME):
    yield None
    return
  about = {
    'threads': os.cpu_count() or 1,
    'pool_bytes': int(held_bytes * SPARE),
  }
  with peer(NAME, 'lmcache_turns.py', about) as program:
    yield program


def missing_rows(bench: str, program: Turns | None) -> list[Row]:
  """A row that says so where LMCache is not installed."""
  why = f'not installed: make peers PEERS={NAME}'
  return [] if program else [Row(f'{bench}.of_lmcache', None, 'ratio', why)]
