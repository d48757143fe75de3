# SPDX-License-Identifier: Apache-2.0
"""One client of a real Mooncake Store, and the memory registered with it.

The wheel (extra `mooncake`; Debian packages libibverbs1 libcurl4 libnuma1)
is imported when a client is made, not before. Two ways to the store:

  tcp, rdma  this process is a member; bytes go to the members that hold them
  daemon     a `mooncake_client` on this host is the member; the memory is
             shared with it, so bytes are copied once
"""

from collections.abc import Callable
from concurrent.futures import Future
import ctypes
from dataclasses import dataclass
import importlib
import math
import mmap
import os
import socket
import threading
import time
from typing import Any
from typing import TypeVar

import numpy as np

from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_lane import Job
from mooncake_jax.transfer.mooncake_lane import Lane

T = TypeVar('T')
LOCAL_BUFFER_BYTES = 16 << 20  # for calls that copy, which we don't make
EXTRA = "pip install 'mooncake_jax[mooncake]'"
LIBRARIES = 'apt-get install libibverbs1 libcurl4 libnuma1'


@dataclass(frozen=True)
class MooncakeConfig:
  """How to reach a store.

  Attributes:
    master: 'host:port' of its master.
    host: this process's address, as other members reach it.
    daemon: 'host:port' of a `mooncake_client` on this host; None makes this
      process a member itself.
    lent_bytes: memory that this process lends to the store, as a member.
    protocol, devices: 'tcp', or 'rdma' with the names of its devices.
    replicas: copies of each block on different members, best effort.
    staging_blocks: blocks that may be on their way at once.
    batch_blocks: blocks in one call at most.
    timeout_s: longest wait of a put, a read or a start.
    pause_s: after the master failed to answer, all fails at once so long.
    remove_on_drop: a dropped block is removed from the store as well, which
      others may be using.
  """

  master: str
  host: str = '127.0.0.1'
  daemon: str | None = None
  lent_bytes: int = 0
  protocol: str = 'tcp'
  devices: str = ''
  replicas: int = 1
  staging_blocks: int = 32
  batch_blocks: int = 16
  timeout_s: float = 5.0
  pause_s: float = 1.0
  remove_on_drop: bool = False

  def __post_init__(self):
    for field in ('master', 'daemon'):
      if (address := getattr(self, field)) is not None:
        _split_address(f'MooncakeConfig.{field}', address)
    for field in ('replicas', 'staging_blocks', 'batch_blocks', 'timeout_s'):
      if not getattr(self, field) > 0:
        raise ValueError(f'MooncakeConfig.{field}={getattr(self, field)} <= 0')
    if self.daemon is not None and self.lent_bytes:
      raise ValueError(
        f'MooncakeConfig.lent_bytes={self.lent_bytes}: where daemon='
        f'{self.daemon!r} is the member, it lends the memory'
      )


class MooncakeClient:
  """A store opened for zero-copy puts and gets of registered memory."""

  def __init__(self, config: MooncakeConfig, num_bytes: int):
    """Joins the store and registers memory.

    Raises:
      ImportError: the wheel or a system library is not there; says which.
      StoreUnreachable, StoreTimeout: the store can't be joined in time.
    """
    limit_waits(config.timeout_s)
    self.config = config
    module = import_wheel('mooncake.store')
    self._store = module.MooncakeDistributedStore()
    self._replicate = module.ReplicateConfig()
    self._replicate.replica_num = config.replicas
    address = config.daemon or config.master
    reach(address, config.timeout_s)
    self.memory = in_time(
      lambda: self._start(num_bytes), config.timeout_s, f'joining {address}'
    )
    self.put_lane = Lane('mooncake-put', config.batch_blocks)
    self.get_lane = Lane('mooncake-get', config.batch_blocks)

  def put(self, jobs: list[Job]) -> list[int]:
    """Puts slots; a key that is there already keeps its value: 0."""
    return self._store.batch_put_from(*_arguments(jobs), self._replicate)

  def get(self, jobs: list[Job]) -> list[int]:
    """Fills slots; returns the objects' bytes."""
    return self._store.batch_get_into(*_arguments(jobs))

  def exists(self, jobs: list[Job]) -> list[int]:
    """1 or 0; takes a lease on what is there."""
    return self._store.batch_is_exist([job.key for job in jobs])

  def remove(self, jobs: list[Job]) -> list[int]:
    """Removes objects that nobody holds a lease on."""
    return self._store.batch_remove([job.key for job in jobs])

  def remove_now(self, jobs: list[Job]) -> list[int]:
    """Removes objects under lease as well."""
    return self._store.batch_remove([job.key for job in jobs], True)

  def close(self, is_idle: Callable[[], bool]) -> None:
    """Leaves the store, in `timeout_s` at most.

    What still hangs in a call, or reads shared memory (not `is_idle`), keeps
    the client open until the process ends.
    """
    until_s = time.monotonic() + self.config.timeout_s
    lanes = (self.put_lane, self.get_lane)
    ended = [lane.close(max(until_s - time.monotonic(), 0)) for lane in lanes]
    shares = self.config.daemon is not None
    while shares and not is_idle() and time.monotonic() < until_s:
      time.sleep(0.01)
    if all(ended) and not (shares and not is_idle()):
      try:
        in_time(self._store.close, self.config.timeout_s, 'leaving the store')
      except StoreTimeout:
        pass  # the master is gone

  def _start(self, num_bytes: int) -> np.ndarray:
    """Joins; returns registered memory, uint8 [num_bytes]."""
    c = self.config
    if c.daemon is not None:
      code = self._store.setup_dummy(num_bytes, LOCAL_BUFFER_BYTES, c.daemon)
      _check(code, f'no mooncake_client at {c.daemon} takes part')
      address = self._store.alloc_from_mem_pool(num_bytes)
      shared = (ctypes.c_ubyte * num_bytes).from_address(address)
      memory = np.ctypeslib.as_array(shared)
    else:
      code = self._store.setup(
        c.host,
        'P2PHANDSHAKE',  # members find each other: no metadata server
        c.lent_bytes,
        LOCAL_BUFFER_BYTES,
        c.protocol,
        c.devices,
        c.master,
      )
      _check(code, f'the master at {c.master} takes no member {c.host}')
      memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    code = self._store.register_buffer(memory.ctypes.data, num_bytes)
    _check(code, f'{num_bytes=} of memory cannot be registered')
    return memory


def limit_waits(timeout_s: float) -> None:
  """Shortens the wheel's own waits, which are of the whole process.

  It reads them once, so the first client's count. Joining holds Python's
  lock, and tries 20 times if it is let.
  """
  seconds = f'{math.ceil(timeout_s)}'
  for name, value in (
    ('MC_RPC_TIMEOUT_MS', f'{timeout_s * 1e3:.0f}'),
    ('MC_TCP_STATUS_TIMEOUT_SEC', seconds),
    ('MC_TCP_PROGRESS_TIMEOUT_SEC', seconds),
    ('MC_STORE_CLIENT_SETUP_RETRIES', '1'),
  ):
    os.environ.setdefault(name, value)


def import_wheel(name: str) -> Any:
  """Imports a module of the wheel.

  Raises:
    ImportError: one line that says what to install.
  """
  os.environ.setdefault('GLOG_minloglevel', '3')  # errors come as codes
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    raise ImportError(f'the Mooncake Store is not installed: {EXTRA}') from None
  except ImportError as error:
    raise ImportError(f'{error}; on Debian: {LIBRARIES}') from None


def reach(address: str, timeout_s: float) -> None:
  """Raises StoreUnreachable unless someone listens; joining would retry."""
  try:
    socket.create_connection(_split_address('', address), timeout_s).close()
  except OSError as error:
    raise StoreUnreachable(f'nobody answers at {address}: {error}') from None


def in_time(call: Callable[[], T], timeout_s: float, what: str) -> T:
  """Calls on a thread of its own; StoreTimeout if it takes too long."""
  future: Future[T] = Future()

  def run() -> None:
    try:
      future.set_result(call())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name='mooncake-once', daemon=True).start()
  try:
    return future.result(timeout_s)
  except TimeoutError:
    raise StoreTimeout(f'{what} took over {timeout_s:.1f} s') from None


def _arguments(jobs: list[Job]) -> tuple[list[str], list[int], list[int]]:
  keys = [job.key for job in jobs]
  pointers = [job.slot.ctypes.data for job in jobs]
  return keys, pointers, [job.slot.nbytes for job in jobs]


def _check(code: int, what: str) -> None:
  if code:
    raise StoreUnreachable(f'{what} (Mooncake error {code})')


def _split_address(name: str, address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(':')
  if not host or not port.isdigit():
    raise ValueError(f"{name}={address!r} must be 'host:port'")
  return host, int(port)
