# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake Store that holds as much as ours, in the same loop.

Each put or get is one call of all its blocks from registered memory that is
warm; the oldest blocks go outside the time, so it never evicts by itself.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import ExitStack
import itertools
import sys
import time

from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_client import MooncakeClient
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_lane import Job
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

TIMEOUT_S = 20.0
SPARE = 1.25  # of what is held, so that nothing is evicted
LEASE_S = 10.0
WAYS = ('tcp', 'shared')


class RealStore:
  """Blocks of a store, each `num_bytes`, at most `room` of them."""

  def __init__(self, client: MooncakeClient, num_bytes: int, room: int):
    self._client = client
    self._num_bytes = num_bytes
    self._room = room
    self._numbers = itertools.count()
    self.held: deque[str] = deque()

  @property
  def is_full(self) -> bool:
    return len(self.held) == self._room

  def put(self, count: int) -> float:
    """Seconds of a put of other blocks."""
    old = [
      self.held.popleft() for _ in range(len(self.held) + count - self._room)
    ]
    self._client.remove_now(self._jobs(self._client.put, old))
    names = [self._name() for _ in range(count)]
    seconds = seconds_of(
      self._client.put, self._jobs(self._client.put, names), 0
    )
    self.held += names
    return seconds

  def get(self, turn: int, count: int) -> float:
    """Seconds of a get of held blocks, others each turn."""
    n = len(self.held)
    names = [self.held[(7 * turn * count + i) % n] for i in range(count)]
    jobs = self._jobs(self._client.get, names)
    return seconds_of(self._client.get, jobs, self._num_bytes)

  def clear(self) -> None:
    """Removes all its blocks."""
    while self.held:
      count = min(len(self.held), self._client.memory.size // self._num_bytes)
      names = [self.held.popleft() for _ in range(count)]
      self._client.remove_now(self._jobs(self._client.put, names))

  def _name(self) -> str:
    return f'{id(self)}.{next(self._numbers)}'

  def _jobs(self, run, names: list[str]) -> list[Job]:
    size, memory = self._num_bytes, self._client.memory
    slots = max(memory.size // size, 1)
    return [
      Job(run, name, memory[i % slots * size : (i % slots + 1) * size], 0.0)
      for i, name in enumerate(names)
    ]


@contextmanager
def real_clients(
  held_bytes: int, call_bytes: int
) -> Iterator[dict[str, MooncakeClient]]:
  """Clients of one store, over loopback TCP and shared memory.

  Args:
    held_bytes: most that each keeps.
    call_bytes: most that one call moves.

  Yields:
    Nothing where the wheel is not installed.
  """
  try:
    import_wheel('mooncake.store')
  except ImportError as error:
    print(f'no real Mooncake Store beside: {error}', file=sys.stderr)
    yield {}
    return
  with ExitStack() as stack:
    master = stack.enter_context(running_master(LEASE_S))
    size = int(held_bytes * len(WAYS) * SPARE)
    storage = stack.enter_context(running_storage(master.address, size))
    clients = {}
    for way, daemon in zip(WAYS, (None, storage.address)):
      config = MooncakeConfig(
        master.address, daemon=daemon, timeout_s=TIMEOUT_S
      )
      clients[way] = client = MooncakeClient(config, call_bytes)
      stack.callback(client.close, lambda: True)
      client.memory[:] = 1
    yield clients


def seconds_of(
  run: Callable[[list[Job]], list[int]], jobs: list[Job], code: int
) -> float:
  """Of one call, all of whose jobs must end with this code."""
  start_s = time.perf_counter()
  codes = run(jobs)
  seconds = time.perf_counter() - start_s
  if set(codes) != {code}:
    raise RuntimeError(f'the Mooncake Store answered {codes}')
  return seconds
