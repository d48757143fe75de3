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

from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_config import split_address
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_lane import Job
from mooncake_jax.transfer.mooncake_lane import Lane

T = TypeVar('T')
LOCAL_BUFFER_BYTES = 16 << 20  # for calls that copy, which we don't make
KEYS_A_CALL = 512
LOOPBACK = '127.0.0.1'
EXTRA = "pip install 'mooncake_jax[mooncake]'"
LIBRARIES = 'apt-get install libibverbs1 libcurl4 libnuma1'


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
    self._put_lane = Lane('mooncake-put', config.batch_blocks)
    self._get_lane = Lane('mooncake-get', config.batch_blocks)
    # Its calls move no blocks, so they take many and are soon over.
    self._ask_lane = Lane('mooncake-ask', KEYS_A_CALL)

  def lane_of(self, run: Callable[[list[Job]], list[int]]) -> Lane:
    """Where calls of one of the methods below queue."""
    if run == self.put:
      return self._put_lane
    return self._get_lane if run == self.get else self._ask_lane

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
    lanes = (self._put_lane, self._get_lane, self._ask_lane)
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
      host = c.host or LOOPBACK
      code = self._store.setup(
        host,
        'P2PHANDSHAKE',  # members find each other: no metadata server
        c.lent_bytes,
        LOCAL_BUFFER_BYTES,
        c.protocol,
        c.devices,
        c.master,
      )
      _check(code, f'the master at {c.master} takes no member {host}')
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
    socket.create_connection(split_address('', address), timeout_s).close()
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
