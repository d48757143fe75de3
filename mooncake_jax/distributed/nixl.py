# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL (UCX): the receiver reads the sender's registered memory.

Arrays are read where they lie, and land in arrays that the caller keeps; both
are registered for the time of the read (6 us each), and their description (2
us, 424 bytes) goes with each offer. NIXL can't forget single descriptions of
another agent's memory: where one is out of date, or they are many, it forgets
the agent and meets it anew (10 ms).

Who gives a read up keeps its arrays until the read has ended; who gives an
offer up keeps its arrays for as long as a read of them may take. A read whose
offer was given up meanwhile does not count.

Nothing goes on in UCX but when it is called: a thread of NIXL's own that does
so takes a quarter of a core, day and night. So the sender calls it while its
offer stands, the receiver while it reads.

NIXL comes without torch in the wheel `nixl-cu12`. Importing it and making an
agent takes 0.8 s.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
import os
from pathlib import Path
import threading
import time
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Offer
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.spec import MoverName

# Where Linux lists such devices; UCX names their ports, as in 'mlx5_0:1'. With
# UCX's module for them a process ends by a segmentation fault (NIXL 1.5.1), so
# it is left out where it has nothing to do.
INFINIBAND = Path('/sys/class/infiniband')
MAX_KNOWN = 4096  # arrays of another agent
Places = Sequence[tuple[int, int]]  # addresses and bytes
SPIN_S = 5e-4  # a read of a few MiB has ended by then
LOOK_EVERY_S = 0.01  # whether the other side is still there


@dataclass(eq=False)
class _Peer:
  """Another agent. What was described of it is known until it is forgotten."""

  known: set[tuple[int, int]] = field(default_factory=set)
  num_inlets: int = 0
  num_reads: int = 0


@dataclass(frozen=True, eq=False)
class _Read:
  """A read under way: it may write into the arrays until it has ended."""

  peer: str
  xfer: Any
  into: Sequence[np.ndarray]
  places: Places


@dataclass(frozen=True, eq=False)
class _Held:
  """An offer that was given up: it may be read for a while."""

  until_s: float
  arrays: Sequence[np.ndarray]
  places: Places


class NixlMover:
  """One NIXL agent of this process."""

  name: MoverName = 'nixl'

  def __init__(self, agent: str, devices: str = ''):
    """Makes the agent; `devices` are the network devices it may use."""
    if devices:
      os.environ.setdefault('UCX_NET_DEVICES', devices)
    if not INFINIBAND.exists() or (devices and ':' not in devices):
      os.environ.setdefault('UCX_MODULES', '^ib')
    os.environ.setdefault('NIXL_LOG_LEVEL', 'ERROR')
    os.environ.setdefault('UCX_LOG_LEVEL', 'error')
    from nixl_cu12 import _api as api

    self.lock = threading.RLock()
    self.abandoned: list[_Read] = []  # their callers gave up
    self.held: list[_Held] = []
    self._peers: dict[str, _Peer] = {}
    self._registered: Counter[tuple[int, int]] = Counter()
    config = api.nixl_agent_config(
      False, False, backends=['UCX'], sync_mode=_strict(api)
    )
    self.agent = api.nixl_agent(agent, config)

  def outlet(self) -> Outlet:
    return _NixlOutlet(self)

  def inlet(self) -> Inlet:
    return _NixlInlet(self)

  def close(self) -> None:
    """Lets go of the agent, and with it of all reads and all peers."""
    with self.lock:
      self._peers.clear()
      del self.agent

  def meet(self, description: bytes) -> str:
    """Takes in another agent's first description; returns its name.

    Raises:
      ValueError: it is none.
    """
    with self.lock:
      name = self._add(description)
      self._peers.setdefault(name, _Peer()).num_inlets += 1
      return name

  def part(self, peer: str) -> None:
    """An inlet from that agent is closed; with the last one it is forgotten."""
    with self.lock:
      known = self._peers.get(peer)
      if known is None:
        return  # the mover was closed before
      known.num_inlets -= 1
      if not known.num_inlets:
        del self._peers[peer]
        self.agent.remove_remote_agent(peer)

  def progress(self) -> None:
    """Does what other agents wait for."""
    with self.lock:
      self.agent.get_new_notifs()

  def register(self, arrays: Sequence[np.ndarray]) -> Places:
    """Makes arrays readable; those that are so already are counted.

    Registered twice and let go of twice, NIXL 1.5.1 ends the process.
    """
    places = [(array.ctypes.data, array.nbytes) for array in arrays]
    with self.lock:
      new = {*places} - self._registered.keys()
      if new:
        self.agent.register_memory(_with_empty(new), 'DRAM')
      self._registered.update(places)
    return places

  def deregister(self, places: Places) -> None:
    with self.lock:
      self._registered.subtract(places)
      gone = [each for each in {*places} if not self._registered[each]]
      for each in gone:
        del self._registered[each]
      if gone:
        self.agent.deregister_memory(self._described(gone))

  def describe(self, places: Places) -> bytes:
    """What another agent must know to read what is registered."""
    with self.lock:
      descs = self._described({*places})
      return self.agent.get_partial_agent_metadata(descs, True, ['UCX'])

  def _described(self, places: Iterable[tuple[int, int]]) -> Any:
    return self.agent.get_reg_descs(_with_empty(places), 'DRAM')

  def hold(
    self, arrays: Sequence[np.ndarray], places: Places, hold_s: float
  ) -> None:
    """Keeps an offer that was given up, at least for so long."""
    with self.lock:
      self.held.append(_Held(time.monotonic() + hold_s, arrays, places))

  def release(self) -> None:
    """Lets go of offers that were held long enough."""
    with self.lock:
      while self.held and self.held[0].until_s < time.monotonic():
        self.deregister(self.held.pop(0).places)

  def begin_read(
    self,
    peer: str,
    description: bytes,
    places: Places,
    into: Sequence[np.ndarray],
  ) -> _Read:
    """Starts to read what another agent describes; then `leave`.

    Raises:
      ConnectionError: there is nothing to read.
    """
    here = self.register(into)
    try:
      with self.lock:
        self._know(peer, description, places)
        read = _Read(peer, self._begun(peer, places, into), into, here)
        self._peers[peer].num_reads += 1
        return read
    except Exception as error:  # NIXL's errors have no common base
      self.deregister(here)
      raise ConnectionError(f'no read from {peer}: {error!r}') from error

  def state(self, read: _Read) -> str:
    """'PROC' while it is under way, then 'DONE' or 'ERR'."""
    with self.lock:
      try:
        return self.agent.check_xfer_state(read.xfer)
      except Exception:  # so NIXL tells of a peer that is gone
        return 'ERR'

  def leave(self, read: _Read) -> None:
    """Nobody waits for it any more; once it has ended its memory is free."""
    with self.lock:
      self.abandoned.append(read)
      self.sweep()

  def sweep(self) -> None:
    """Lets go of the reads that were left and have ended."""
    with self.lock:
      for read in [*self.abandoned]:
        if self.state(read) != 'PROC':
          self.abandoned.remove(read)
          self.agent.release_xfer_handle(read.xfer)
          self.deregister(read.places)
          if read.peer in self._peers:
            self._peers[read.peer].num_reads -= 1

  def _know(self, peer: str, description: bytes, places: Places) -> None:
    """Takes in where another agent's arrays lie now."""
    known = self._peers[peer]
    is_much = len(known.known.union(places)) > MAX_KNOWN
    try:
      if is_much and not known.num_reads:
        raise LookupError('too many are known')
      self._add(description)
    except Exception:  # something else lay there before
      if known.num_reads:
        raise
      self.agent.remove_remote_agent(peer)
      known.known.clear()
      self._add(description)
    known.known.update(places)

  def _add(self, description: bytes) -> str:
    name = self.agent.add_remote_agent(description)
    return name.decode() if isinstance(name, bytes) else name

  def _begun(
    self, peer: str, places: Places, into: Sequence[np.ndarray]
  ) -> Any:
    here = [(array.ctypes.data, array.nbytes, 0) for array in into]
    there = [(at, num_bytes, 0) for at, num_bytes in places]
    agent = self.agent
    xfer = agent.initialize_xfer(
      'READ',
      agent.get_xfer_descs(here, 'DRAM'),
      agent.get_xfer_descs(there, 'DRAM'),
      peer,
    )
    agent.transfer(xfer)
    return xfer


class _NixlOutlet:
  """Arrays that the other side reads where they lie."""

  def __init__(self, mover: NixlMover):
    self._mover = mover

  @contextmanager
  def offer(
    self, arrays: Sequence[np.ndarray], hold_s: float
  ) -> Iterator[Offer]:
    mover = self._mover
    mover.release()
    arrays = [*map(np.ascontiguousarray, arrays)]
    places = mover.register(arrays)
    note = {
      'agent': mover.describe(places).hex(),
      'places': [at for at, _ in places],
    }
    try:
      yield Offer(note)
    except BaseException:
      mover.hold(arrays, places, hold_s)
      raise
    mover.deregister(places)

  @property
  def help(self) -> Callable[[], None]:
    return self._mover.progress

  def close(self) -> None:
    """Has nothing of its own."""


class _NixlInlet:
  """Reads what one other agent has registered."""

  joins = True

  def __init__(self, mover: NixlMover):
    self._mover = mover
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
      self._peer = self._mover.meet(description)
    sizes = [array.nbytes for array in into]
    read = self._mover.begin_read(
      self._peer, description, [*zip(places, sizes)], into
    )
    try:
      has_come = self._wait(read, channel, stall_s)
    finally:
      self._mover.leave(read)
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
      self._mover.part(self._peer)
    self._peer = None

  def _wait(self, read: '_Read', channel: Channel, stall_s: float) -> bool:
    """Whether the bytes came, and the offer still stands."""
    begun_s = looked_s = time.perf_counter()
    while (state := self._mover.state(read)) == 'PROC':
      now_s = time.perf_counter()
      if now_s - begun_s > SPIN_S:
        time.sleep(5e-5)
      if now_s - looked_s > LOOK_EVERY_S:
        looked_s = now_s
        if channel.is_gone or now_s - begun_s > stall_s:
          return False
    return state == 'DONE' and not channel.is_gone


def _with_empty(places: Iterable[tuple[int, int]]) -> list[Any]:
  """As NIXL takes them: on device 0, with no more to say."""
  return [(at, num_bytes, 0, '') for at, num_bytes in places]


def _strict(api: Any) -> Any:
  """Several threads use the agent."""
  return api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
