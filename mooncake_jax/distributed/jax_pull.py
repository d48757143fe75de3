# SPDX-License-Identifier: Apache-2.0
"""Bytes by `jax.experimental.transfer`: the receiver pulls arrays.

For where NIXL is absent, TPU hosts above all. It knows no refusal and keeps no
deadline: a number that is unknown or was pulled before is waited for without
end, and another dtype of the same size comes as it is. So each array is pulled
as bytes, under a number of its own that is never used twice, once the message
that offers it was held against this KVCache; who waits looks whether it is
there, up to a deadline and while the other side's connection stands. What
nobody pulled in the end is pulled by its own sender, which frees it.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
import secrets
import threading
import time
from typing import Any

import jax
from jax.experimental.transfer import start_transfer_server
from jax.sharding import SingleDeviceSharding
import numpy as np

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.channel import raw_views
from mooncake_jax.distributed.mover import Held
from mooncake_jax.distributed.mover import Inlet
from mooncake_jax.distributed.mover import Offer
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.spec import MoverName

LOOK_EVERY_S = 0.01  # whether the other side is still there
CONNECT_S = 5.0
NUMBER_BITS = 62
Numbers = Sequence[tuple[int, int]]  # of arrays, with their bytes


class JaxMover:
  """One transfer server of this process."""

  name: MoverName = 'jax'

  def __init__(self, bind: str):
    """Starts the server, at a free port of an address of this host."""
    self.device = jax.local_devices()[0]
    place = SingleDeviceSharding(self.device)
    self._place = place
    self.server = start_transfer_server(
      self.device.client, f'{bind}:0', [f'{bind}:0']
    )
    self.held: Held[Numbers] = Held(self._take_back)
    self._own: Any = None

  def outlet(self) -> Outlet:
    return _JaxOutlet(self)

  def inlet(self) -> Inlet:
    return _JaxInlet(self)

  def close(self) -> None:
    """Lets go of the server."""
    self._own = None
    del self.server

  def pull(self, connection: Any, numbers: Numbers) -> list[Any]:
    """Asks for arrays, which come in time or never."""
    return [
      connection.pull(
        number, jax.ShapeDtypeStruct((size,), np.uint8, sharding=self._place)
      )
      for number, size in numbers
    ]

  def _take_back(self, numbers: Numbers) -> None:
    """Pulls what nobody pulled: else the server keeps it for ever."""
    if self._own is None:
      self._own = self.server.connect(self.server.address())
    self.pull(self._own, numbers)


class _JaxOutlet:
  """Arrays that the server gives away."""

  help = None

  def __init__(self, mover: JaxMover):
    self._mover = mover

  @contextmanager
  def offer(
    self, arrays: Sequence[np.ndarray], hold_s: float
  ) -> Iterator[Offer]:
    mover = self._mover
    mover.held.release()
    numbers = []
    for view in raw_views(arrays):
      number = secrets.randbits(NUMBER_BITS)  # whom it is not told can't guess
      raw = jax.device_put(np.asarray(view), mover.device)
      mover.server.await_pull(number, raw)
      numbers.append((number, len(view)))
    note = {
      'server': mover.server.address(),
      'numbers': [number for number, _ in numbers],
    }
    try:
      yield Offer(note)
    except BaseException:
      mover.held.hold(numbers, hold_s)
      raise

  def close(self) -> None:
    """Has nothing of its own."""


class _JaxInlet:
  """Pulls from one other server."""

  joins = True

  def __init__(self, mover: JaxMover):
    self._mover = mover
    self._server = ''
    self._connection: Any = None

  def fetch(
    self,
    note: Mapping[str, Any],
    first: int,
    into: Sequence[np.ndarray],
    channel: Channel,
    stall_s: float,
  ) -> None:
    pulled = self._pull(note, first, [array.nbytes for array in into])
    try:
      if not _have_come(pulled, channel, stall_s):
        raise ConnectionResetError(f'JAX pulled nothing from {self._server}')
      for array, view in zip(pulled, raw_views(into)):
        np.copyto(np.asarray(view), np.asarray(array))
    except jax.errors.JaxRuntimeError as error:
      raise ConnectionResetError(f'{self._server}: {error}') from error

  def skip(
    self,
    note: Mapping[str, Any],
    first: int,
    sizes: Sequence[int],
    channel: Channel,
  ) -> None:
    """Pulls all the same: else its sender keeps it for ever."""
    self._pull(note, first, sizes)

  def close(self) -> None:
    self._connection = None

  def _pull(
    self, note: Mapping[str, Any], first: int, sizes: Sequence[int]
  ) -> list[Any]:
    try:
      server = str(note['server'])
      some = note['numbers'][first : first + len(sizes)]
      numbers = [*zip(map(int, some), sizes, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f'an offer without numbers: {error!r}') from error
    if server != self._server:
      self._connection = _within(
        CONNECT_S, lambda: self._mover.server.connect(server)
      )
      self._server = server
    return _within(
      CONNECT_S, lambda: self._mover.pull(self._connection, numbers)
    )


def _have_come(arrays: Sequence[Any], channel: Channel, stall_s: float) -> bool:
  """Whether all are there, and their offer still stands."""
  waiting, looked_s = [*arrays], time.perf_counter()
  moved_s = looked_s
  while waiting:
    left = [array for array in waiting if not array.is_ready()]
    now_s = time.perf_counter()
    if len(left) < len(waiting):
      waiting, moved_s = left, now_s
      continue
    if now_s - looked_s > LOOK_EVERY_S:
      looked_s = now_s
      if channel.is_gone or now_s - moved_s > stall_s:
        return False
    time.sleep(1e-4)
  return not channel.is_gone


def _within(seconds: float, call: Callable[[], Any]) -> Any:
  """What the call returns; it may hang, and is left alone then.

  Raises:
    ConnectionError: it takes longer, or fails.
  """
  found: list[Any] = []

  def run() -> None:
    try:
      found.append(call())
    except Exception as error:
      found.append(ConnectionError(f'JAX: {error}'))

  thread = threading.Thread(target=run, name='jax-pull', daemon=True)
  thread.start()
  thread.join(seconds)
  if not found:
    raise ConnectionError(f'JAX takes longer than {seconds:g} s')
  if isinstance(found[0], Exception):
    raise found[0]
  return found[0]
