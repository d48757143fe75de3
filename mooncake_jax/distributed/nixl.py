# SPDX-License-Identifier: Apache-2.0
"""Bytes by NIXL (UCX): the receiver reads the sender's registered memory.

Offered bytes are copied into one registered buffer a connection, which stays
as long as the connection does; its description goes to the other side with
the first offer after it was made. What is read lands in the arrays that the
caller keeps, registered for the time of the read (30 to 80 us).

Nothing goes on in UCX but when it is called: a thread of NIXL's own that does
so takes a quarter of a core, day and night. So the sender calls it while its
offer stands, the receiver while it reads.

NIXL comes without torch in the wheel `nixl-cu12`. Importing it and making an
agent takes 0.8 s.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
import os
from pathlib import Path
import threading
import time
from typing import Any

import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.channel import raw_views
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Offer
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.spec import MoverName

# Where Linux lists such devices; UCX names their ports, as in 'mlx5_0:1'. With
# UCX's module for them a process ends by a segmentation fault (NIXL 1.5.1), so
# it is left out where it has nothing to do.
INFINIBAND = Path('/sys/class/infiniband')
LEAST_BUFFER_BYTES = 1 << 20
SPIN_S = 5e-4  # a read of a few MiB has ended by then
LOOK_EVERY_S = 0.01  # whether the other side is still there


@dataclass(frozen=True, eq=False)
class _Read:
  """A read under way: it may write into the arrays until it has ended."""

  xfer: Any
  into: Sequence[np.ndarray]
  handles: Sequence[Any]


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
    self._inlets: Counter[str] = Counter()
    config = api.nixl_agent_config(
      False, False, backends=['UCX'], sync_mode=_strict(api)
    )
    self.agent = api.nixl_agent(agent, config)

  def outlet(self) -> Outlet:
    return _NixlOutlet(self)

  def inlet(self) -> Inlet:
    return _NixlInlet(self)

  def close(self) -> None:
    """Lets go of the agent, and with it of all reads."""
    del self.agent

  def meet(self, description: bytes, is_new: bool) -> str:
    """Takes in what another agent has registered; returns its name."""
    with self.lock:
      name = self.agent.add_remote_agent(description)
      name = name.decode() if isinstance(name, bytes) else name
      self._inlets[name] += is_new
      return name

  def part(self, peer: str) -> None:
    """An inlet from that agent is closed; with the last one it is forgotten."""
    with self.lock:
      self._inlets[peer] -= 1
      if not self._inlets[peer]:
        self.agent.remove_remote_agent(peer)

  def progress(self) -> None:
    """Does what other agents wait for."""
    with self.lock:
      self.agent.get_new_notifs()

  def register(self, array: np.ndarray) -> Any:
    place = (array.ctypes.data, array.nbytes, 0, '')
    with self.lock:
      return self.agent.register_memory([place], 'DRAM')

  def deregister(self, handle: Any) -> None:
    with self.lock:
      self.agent.deregister_memory(handle)

  def begin_read(self, peer: str, at: int, into: Sequence[np.ndarray]) -> _Read:
    """Starts to read what is at an address of another agent; then `leave`.

    Raises:
      ConnectionError: there is nothing to read.
    """
    handles = [self.register(array) for array in into]
    try:
      return _Read(self._begun(peer, at, into), into, handles)
    except Exception as error:  # NIXL's errors have no common base
      for handle in handles:
        self.deregister(handle)
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
          for handle in read.handles:
            self.deregister(handle)

  def _begun(self, peer: str, at: int, into: Sequence[np.ndarray]) -> Any:
    here, there = [], []
    for array in into:
      here.append((array.ctypes.data, array.nbytes, 0))
      there.append((at, array.nbytes, 0))
      at += array.nbytes
    with self.lock:
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
  """A registered buffer that the other side reads from."""

  def __init__(self, mover: NixlMover):
    self._mover = mover
    self._buffer: np.ndarray | None = None
    self._handle: Any = None

  @contextmanager
  def offer(self, arrays: Sequence[np.ndarray]) -> Iterator[Offer]:
    num_bytes = sum(array.nbytes for array in arrays)
    news = self._grow(num_bytes)
    buffer, at = self._buffer, 0
    assert buffer is not None
    for view in raw_views(arrays):
      buffer[at : at + len(view)] = view
      at += len(view)
    yield Offer({'at': buffer.ctypes.data, **news})

  @property
  def help(self) -> Callable[[], None]:
    return self._mover.progress

  def close(self) -> None:
    if self._handle is not None:
      self._mover.deregister(self._handle)
    self._handle = self._buffer = None

  def _grow(self, num_bytes: int) -> dict[str, str]:
    """Makes room; returns what the other side must know of it."""
    if self._buffer is not None and num_bytes <= len(self._buffer):
      return {}
    self.close()
    size = max(LEAST_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
    self._buffer = np.zeros(size, np.uint8)  # touched: no page fault later
    self._handle = self._mover.register(self._buffer)
    with self._mover.lock:
      return {'agent': self._mover.agent.get_agent_metadata().hex()}


class _NixlInlet:
  """Reads what one other agent has registered."""

  def __init__(self, mover: NixlMover):
    self._mover = mover
    self._peer: str | None = None

  def fetch(
    self,
    note: Mapping[str, Any],
    into: Sequence[np.ndarray],
    channel: Channel,
    stall_s: float,
  ) -> None:
    if 'agent' in note:
      self._meet(bytes.fromhex(note['agent']))
    if self._peer is None or not isinstance(note.get('at'), int):
      raise ValueError('an offer without a place')
    read = self._mover.begin_read(self._peer, note['at'], into)
    try:
      has_come = self._wait(read, channel, stall_s)
    finally:
      self._mover.leave(read)
    if not has_come:
      raise ConnectionResetError(f'NIXL could not read from {self._peer}')

  def skip(
    self, note: Mapping[str, Any], num_bytes: int, channel: Channel
  ) -> None:
    if 'agent' in note:
      self._meet(bytes.fromhex(note['agent']))

  def close(self) -> None:
    if self._peer is not None:
      self._mover.part(self._peer)
    self._peer = None

  def _meet(self, description: bytes) -> None:
    self._peer = self._mover.meet(description, is_new=self._peer is None)

  def _wait(self, read: '_Read', channel: Channel, stall_s: float) -> bool:
    """Whether the bytes came."""
    begun_s = looked_s = time.perf_counter()
    while (state := self._mover.state(read)) == 'PROC':
      now_s = time.perf_counter()
      if now_s - begun_s > SPIN_S:
        time.sleep(5e-5)
      if now_s - looked_s > LOOK_EVERY_S:
        looked_s = now_s
        if channel.is_gone or now_s - begun_s > stall_s:
          return False
    return state == 'DONE'


def _strict(api: Any) -> Any:
  """Several threads use the agent."""
  return api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
