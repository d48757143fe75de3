# SPDX-License-Identifier: Apache-2.0
"""The sending end: a way into another process, as a far segment.

What is stored here arrives there under the number that the replica has. A
store returns when the other side has the bytes, checked.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
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

VERSION = 3
# A message is so long that what waits behind it, and may be more urgent, waits
# about so long: on slow lines as short, on fast ones as long as makes sense.
MESSAGE_S = 0.02
MESSAGE_BYTES = 4 << 20, 32 << 20
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
    self.batch_bytes = MESSAGE_BYTES[0]

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
    (error,) = self.store_all([(replica, part)])
    if error is not None:
      raise error

  def store_all(
    self, items: Sequence[tuple[Replica, Part]]
  ) -> list[Exception | None]:
    """Sends parts in one message; why each did not arrive, or None."""
    if self._spec.checksums:
      items = [(replica, with_checksum(part)) for replica, part in items]
    begun_s = time.perf_counter()
    try:
      answers = self._exchange(items)
    except Exception as error:
      self._hang_up(threading.get_ident())
      self.batch_bytes = MESSAGE_BYTES[0]
      return [error] * len(items)
    self._pace(items, time.perf_counter() - begun_s)
    return [*map(self._refusal, answers)]

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

  def _pace(self, items: Sequence[tuple[Replica, Part]], took_s: float) -> None:
    """Has the next messages take about `MESSAGE_S`."""
    least, most = MESSAGE_BYTES
    num_bytes = sum(part.num_bytes for _, part in items)
    if took_s > 2 * MESSAGE_S:
      self.batch_bytes = max(self.batch_bytes // 2, least)
    elif took_s < MESSAGE_S and 2 * num_bytes > self.batch_bytes:
      self.batch_bytes = min(2 * self.batch_bytes, most)

  def _exchange(
    self, items: Sequence[tuple[Replica, Part]]
  ) -> list[dict[str, Any]]:
    line = self._line()
    arrays = [np.asarray(array) for _, part in items for array in part.slices]
    # The other side waits for room and then reads, either at most `stall_s`.
    with line.outlet.offer(arrays, 2 * self._spec.stall_s) as offer:
      parts = [_described(*item) for item in items]
      message = {'parts': parts, 'note': offer.note}
      line.channel.send(message, offer.payload)
      answers = []
      while len(answers) < len(items):
        answers += self._answered(line)
    if len(answers) != len(items):
      raise ConnectionError(f'{self._to}: {len(answers)} of {len(items)}')
    return answers

  def _answered(self, line: '_Line') -> list[dict[str, Any]]:
    """What the other side says next, of one part at least."""
    if line.outlet.help is not None:
      self._help(line, line.outlet.help)
    answers = line.channel.receive().get('answers')
    if not answers:
      raise ConnectionError(f'{self._to} answers nothing')
    return answers

  def _refusal(self, answer: dict[str, Any]) -> Exception | None:
    if answer.get('status') == 'landed':
      return None
    error = answer.get('error', 'no answer')
    return ConnectionRefusedError(f'{self._to}: {error}')

  def _help(self, line: '_Line', help_on: Callable[[], None]) -> None:
    """Until there is an answer; TimeoutError if none comes."""
    begun_s = time.perf_counter()
    while (waited_s := time.perf_counter() - begun_s) < self._spec.stall_s:
      help_on()
      # Who waits longer looks less often, and spares a core.
      if line.channel.has_news(min(max(waited_s, 1e-4), 1e-3)):
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


def _described(replica: Replica, part: Part) -> dict[str, Any]:
  return {
    'number': replica.replica_id,
    'layers': [part.start_layer, part.stop_layer],
    'dtype': np.dtype(part.slices[0].dtype).name,
    'shapes': [array.shape for array in part.slices],
    'total': part.total,
  }


@dataclass(frozen=True)
class _Line:
  """One connection; parts go over it one by one."""

  channel: Channel
  outlet: Outlet
