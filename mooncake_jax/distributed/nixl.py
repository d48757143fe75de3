# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL (UCX): the receiver reads the sender's registered memory.

Arrays are read where they lie, and land in arrays that the caller keeps. What
this process offers is one agent's; it calls that while its offer stands. Those
that read are others, so that several connections get on at once.

Who gives a read up keeps its arrays until the read has ended; who gives an
offer up keeps its arrays for as long as a read of them may take. A read whose
offer was given up meanwhile does not count.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
import threading
import time
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.mover import Held
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Offer
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.nixl_agent import NixlAgent
from mooncake_jax.distributed.nixl_agent import Places
from mooncake_jax.distributed.nixl_agent import Read
from mooncake_jax.distributed.spec import MoverName

MAX_READERS = 8  # agents; further connections share them
SPIN_S = 5e-4  # a read of a few MiB has ended by then
LOOK_EVERY_S = 0.01  # whether the other side is still there


class NixlMover:
  """The NIXL agents of this process."""

  name: MoverName = 'nixl'

  def __init__(self, agent: str, devices: str = ''):
    """Makes the agent that offers; see `NixlAgent`."""
    self._name, self._devices = agent, devices
    self._lock = threading.Lock()
    self.offering = NixlAgent(agent, devices)
    # With the number of connections that read by each.
    self.readers: dict[NixlAgent, int] = {}
    # Offers that were given up: the arrays stay as long as their places.
    self.held: Held[tuple[Sequence[np.ndarray], Places]] = Held(
      lambda offer: self.offering.deregister(offer[1])
    )

  def outlet(self) -> Outlet:
    return _NixlOutlet(self)

  def inlet(self) -> Inlet:
    return _NixlInlet(self)

  def take_reader(self) -> NixlAgent:
    """An agent to read by, one that nobody has if that may be."""
    with self._lock:
      free = min(self.readers, key=self.readers.__getitem__, default=None)
      is_taken = free is None or self.readers[free] > 0
      if is_taken and len(self.readers) < MAX_READERS:
        name = f'{self._name}/{len(self.readers)}'
        free = NixlAgent(name, self._devices)
      assert free is not None
      self.readers[free] = self.readers.get(free, 0) + 1
      return free

  def give_reader(self, reader: NixlAgent) -> None:
    """It is not needed any more."""
    with self._lock:
      self.readers[reader] -= 1

  def close(self) -> None:
    """Lets go of the agents, and with them of all reads and all peers."""
    with self._lock:
      for agent in (self.offering, *self.readers):
        agent.close()


class _NixlOutlet:
  """Arrays that the other side reads where they lie."""

  def __init__(self, mover: NixlMover):
    self._mover = mover

  @contextmanager
  def offer(
    self, arrays: Sequence[np.ndarray], hold_s: float
  ) -> Iterator[Offer]:
    agent, held = self._mover.offering, self._mover.held
    held.release()
    arrays = [*map(np.ascontiguousarray, arrays)]
    places = agent.register(arrays)
    note = {
      'agent': agent.describe(places).hex(),
      'places': [at for at, _ in places],
    }
    try:
      yield Offer(note)
    except BaseException:
      held.hold((arrays, places), hold_s)
      raise
    agent.deregister(places)

  @property
  def help(self) -> Callable[[], None]:
    return self._mover.offering.progress

  def close(self) -> None:
    """Has nothing of its own."""


class _NixlInlet:
  """Reads what one other agent has registered."""

  joins = True

  def __init__(self, mover: NixlMover):
    self._mover = mover
    self._agent = mover.take_reader()
    self._peer: str | None = None

  def fetch(
    self,
    note: Mapping[str, Any],
    first: int,
    into: Sequence[np.ndarray],
    channel: Channel,
    stall_s: float,
  ) -> None:
    try:
      description = bytes.fromhex(note['agent'])
      places = [int(at) for at in note['places'][first : first + len(into)]]
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f'an offer without a place: {error!r}') from error
    if len(places) != len(into):
      raise ValueError(f'{len(places)} places of {len(into)}')
    if self._peer is None:
      self._peer = self._agent.meet(description)
    sizes = [array.nbytes for array in into]
    read = self._agent.begin_read(
      self._peer, description, [*zip(places, sizes)], into
    )
    try:
      has_come = self._wait(read, channel, stall_s)
    finally:
      self._agent.leave(read)
    if not has_come:
      raise ConnectionResetError(f'NIXL could not read from {self._peer}')

  def skip(
    self,
    note: Mapping[str, Any],
    first: int,
    sizes: Sequence[int],
    channel: Channel,
  ) -> None:
    """What is not read is left."""

  def close(self) -> None:
    if self._peer is not None:
      self._agent.part(self._peer)
    self._peer = None
    self._mover.give_reader(self._agent)

  def _wait(self, read: Read, channel: Channel, stall_s: float) -> bool:
    """Whether the bytes came, and the offer still stands."""
    begun_s = looked_s = time.perf_counter()
    while (state := self._agent.state(read)) == 'PROC':
      now_s = time.perf_counter()
      if now_s - begun_s > SPIN_S:
        time.sleep(5e-5)
      if now_s - looked_s > LOOK_EVERY_S:
        looked_s = now_s
        if channel.is_gone or now_s - begun_s > stall_s:
          return False
    return state == 'DONE' and not channel.is_gone
