# SPDX-License-Identifier: Apache-2.0
"""A NIXL agent (UCX): its registered memory, and reads of other agents'.

Memory is registered for the time of a read (6 us an array), and its
description (2 us, 424 bytes) goes with each offer. NIXL can't forget single
descriptions of another agent's memory: where one is out of date, or they are
many, it forgets the agent and meets it anew (10 ms).

Nothing goes on in UCX but when it is called: a thread of NIXL's own that does
so takes a quarter of a core, day and night. And an agent does one thing at a
time: where it reads another process of this host it copies itself, and all
others who call it wait.

NIXL comes without torch in the wheel `nixl-cu12`. Importing it and making an
agent takes 0.8 s, each further agent 0.05 s, 5 MiB and 8 open files.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import os
from pathlib import Path
import threading
from typing import Any

import numpy as np

# Where Linux lists such devices; UCX names their ports, as in 'mlx5_0:1'. With
# UCX's module for them a process ends by a segmentation fault (NIXL 1.5.1), so
# it is left out where it has nothing to do.
INFINIBAND = Path('/sys/class/infiniband')
MAX_KNOWN = 4096  # arrays of another agent
Places = Sequence[tuple[int, int]]  # addresses and bytes


@dataclass(eq=False)
class _Peer:
  """Another agent. What was described of it is known until it is forgotten."""

  known: set[tuple[int, int]] = field(default_factory=set)
  num_inlets: int = 0
  num_reads: int = 0


@dataclass(frozen=True, eq=False)
class Read:
  """A read under way: it may write into the arrays until it has ended."""

  peer: str
  xfer: Any
  into: Sequence[np.ndarray]
  places: Places


class NixlAgent:
  """An agent. Any thread may call, and waits for the others."""

  def __init__(self, name: str, devices: str = ''):
    """Makes the agent; `devices` are the network devices it may use."""
    if devices:
      os.environ.setdefault('UCX_NET_DEVICES', devices)
    if not INFINIBAND.exists() or (devices and ':' not in devices):
      os.environ.setdefault('UCX_MODULES', '^ib')
    os.environ.setdefault('NIXL_LOG_LEVEL', 'ERROR')
    os.environ.setdefault('UCX_LOG_LEVEL', 'error')
    from nixl_cu12 import _api as api

    self.lock = threading.RLock()
    self.abandoned: list[Read] = []  # their callers gave up
    self.peers: dict[str, _Peer] = {}
    self.registered: Counter[tuple[int, int]] = Counter()
    config = api.nixl_agent_config(
      False, False, backends=['UCX'], sync_mode=_strict(api)
    )
    self.agent = api.nixl_agent(name, config)

  def close(self) -> None:
    """Lets go of all reads and all peers."""
    with self.lock:
      self.peers.clear()
      del self.agent

  def meet(self, description: bytes) -> str:
    """Takes in another agent's first description; returns its name.

    Raises:
      ValueError: it is none.
    """
    with self.lock:
      name = self._add(description)
      self.peers.setdefault(name, _Peer()).num_inlets += 1
      return name

  def part(self, peer: str) -> None:
    """An inlet from that agent is closed; with the last one it is forgotten."""
    with self.lock:
      known = self.peers.get(peer)
      if known is None:
        return  # the agent was closed before
      known.num_inlets -= 1
      if not known.num_inlets:
        del self.peers[peer]
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
      new = {*places} - self.registered.keys()
      if new:
        self.agent.register_memory(_with_empty(new), 'DRAM')
      self.registered.update(places)
    return places

  def deregister(self, places: Places) -> None:
    with self.lock:
      self.registered.subtract(places)
      gone = [each for each in {*places} if not self.registered[each]]
      for each in gone:
        del self.registered[each]
      if gone:
        self.agent.deregister_memory(self._described(gone))

  def describe(self, places: Places) -> bytes:
    """What another agent must know to read what is registered."""
    with self.lock:
      descs = self._described({*places})
      return self.agent.get_partial_agent_metadata(descs, True, ['UCX'])

  def _described(self, places: Iterable[tuple[int, int]]) -> Any:
    return self.agent.get_reg_descs(_with_empty(places), 'DRAM')

  def begin_read(
    self,
    peer: str,
    description: bytes,
    places: Places,
    into: Sequence[np.ndarray],
  ) -> Read:
    """Starts to read what another agent describes; then `leave`.

    Raises:
      ConnectionError: there is nothing to read.
    """
    here = self.register(into)
    try:
      with self.lock:
        self._know(peer, description, places)
        read = Read(peer, self._begun(peer, places, into), into, here)
        self.peers[peer].num_reads += 1
        return read
    except Exception as error:  # NIXL's errors have no common base
      self.deregister(here)
      raise ConnectionError(f'no read from {peer}: {error!r}') from error

  def state(self, read: Read) -> str:
    """'PROC' while it is under way, then 'DONE' or 'ERR'."""
    with self.lock:
      try:
        return self.agent.check_xfer_state(read.xfer)
      except Exception:  # so NIXL tells of a peer that is gone
        return 'ERR'

  def leave(self, read: Read) -> None:
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
          if read.peer in self.peers:
            self.peers[read.peer].num_reads -= 1

  def _know(self, peer: str, description: bytes, places: Places) -> None:
    """Takes in where another agent's arrays lie now."""
    known = self.peers[peer]
    new = {*places} - known.known
    is_much = len(known.known) + len(new) > MAX_KNOWN
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


def _with_empty(places: Iterable[tuple[int, int]]) -> list[Any]:
  """As NIXL takes them: on device 0, with no more to say."""
  return [(at, num_bytes, 0, '') for at, num_bytes in places]


def _strict(api: Any) -> Any:
  """Several threads use the agent."""
  return api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
