# SPDX-License-Identifier: Apache-2.0
"""The sending end: a way into another process, as a far segment.

What is stored here arrives there under the number that the replica has. A
store returns when the other side has the bytes, checked.
"""

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
import threading
import time
from typing import Any

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import wire_segment
from mooncake_jax.distributed.channel import Address
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.mover import Outlet
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.transfer.far import Layers
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.segment import with_checksum

VERSION = 1
GREETING = -1  # the number of a part that is only to open the way


class Wire:
  """Into one other process, a connection a thread, each opened when needed."""

  def __init__(self, to: str, spec: WireSpec, mover: Mover, secret: str):
    """Makes a wire to the instance of that name, whose address is unknown.

    Args:
      secret: all instances of a cluster know it.
    """
    self.name = wire_segment(to)
    self.capacity_bytes = 0
    self._to = to
    self._spec = spec
    self._mover = mover
    self._secret = secret
    self._lock = threading.Lock()
    self._address: Address | None = None
    self._lines: dict[int, _Line] = {}

  @property
  def used_bytes(self) -> int:
    return 0

  def lead_to(self, address: Address | None) -> None:
    """Where the instance listens from now on. Any thread may call."""
    with self._lock:
      self._address = address
      for line in self._lines.values():
        line.channel.close()  # a store under way fails, the next opens anew

  def store(self, replica: Replica, part: Part) -> None:
    """Sends a part.

    Raises:
      OSError: it did not arrive, or nobody wants it.
    """
    if self._spec.checksums:
      part = with_checksum(part)
    arrays = [np.asarray(array) for array in part.slices]
    try:
      answer = self._exchange(replica.replica_id, part, arrays)
    except Exception:
      self._hang_up(threading.get_ident())
      raise
    if answer.get('status') != 'landed':
      raise ConnectionRefusedError(
        f'{self._to}: {answer.get("error", "no answer")}'
      )

  def greet(self, part: Part) -> None:
    """Sends a part that nobody wants, so that the way is open for others.

    NIXL takes 0.2 s for the first bytes between two processes.

    Raises:
      OSError: the other side is not there.
    """
    self.store(Replica(self.name, GREETING, b''), part)

  def keep(self, replica: Replica, layers: Layers) -> None:
    """It is readable where it arrived."""

  def forget(self, replica: Replica, layers: Layers) -> None:
    """It is the other side's to forget."""

  def ranges(
    self, replica: Replica, start_layer: int, stop_layer: int
  ) -> tuple[Layers, ...]:
    """Nothing can be read here."""
    raise LookupError(f'{self.name} only leads away')

  def read(self, replica: Replica, layers: Layers) -> Part:
    """Nothing can be read here."""
    raise LookupError(f'{self.name} only leads away')

  def drop(self, replicas: Iterable[Replica]) -> None:
    """Keeps nothing."""

  def sweep(self) -> None:
    """Keeps nothing."""

  def close(self) -> None:
    """Hangs up, once no store is under way."""
    for thread in [*self._lines]:
      self._hang_up(thread)

  def _exchange(
    self, number: int, part: Part, arrays: list[np.ndarray]
  ) -> dict[str, Any]:
    line = self._line()
    with line.outlet.offer(arrays) as offer:
      message = {
        'number': number,
        'layers': [part.start_layer, part.stop_layer],
        'dtype': arrays[0].dtype.name,
        'shapes': [array.shape for array in arrays],
        'total': part.total,
        'note': offer.note,
      }
      line.channel.send(message, offer.payload)
      if line.outlet.help is not None:
        self._help(line, line.outlet.help)
      return line.channel.receive()

  def _help(self, line: '_Line', help_on: Callable[[], None]) -> None:
    """Until there is an answer; TimeoutError if none comes."""
    begun_s = time.perf_counter()
    while (waited_s := time.perf_counter() - begun_s) < self._spec.stall_s:
      help_on()
      # Who waits longer looks less often, and spares a core.
      if line.channel.has_news(min(max(waited_s / 4, 5e-5), 1e-3)):
        return
    raise TimeoutError(f'{self._to} did not answer')

  def _line(self) -> '_Line':
    """The calling thread's own, opened if it has none that leads there."""
    thread = threading.get_ident()
    with self._lock:
      line, address = self._lines.get(thread), self._address
    if line is not None and not line.channel.is_closed:
      return line
    self._hang_up(thread)
    if address is None:
      raise ConnectionRefusedError(f'{self._to} is not there')
    channel = Channel.to(address, self._spec.stall_s)
    try:
      self._greeted(channel)
    except BaseException:
      channel.close()
      raise
    line = _Line(channel, self._mover.outlet())
    with self._lock:
      self._lines[thread] = line
      if self._address != address:  # it was led elsewhere meanwhile
        channel.close()
    return line

  def _greeted(self, channel: Channel) -> None:
    """Raises OSError if the other side won't have this one."""
    hello = {
      'version': VERSION,
      'secret': self._secret,
      'mover': self._mover.name,
    }
    channel.send(hello)
    if why := channel.receive().get('error'):
      raise ConnectionRefusedError(f'{self._to}: {why}')

  def _hang_up(self, thread: int) -> None:
    with self._lock:
      line = self._lines.pop(thread, None)
    if line is not None:
      line.channel.close()
      line.outlet.close()


@dataclass(frozen=True)
class _Line:
  """One connection; parts go over it one by one."""

  channel: Channel
  outlet: Outlet
