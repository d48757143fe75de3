# SPDX-License-Identifier: Apache-2.0
"""Parts that other processes send: who waits for them, and what came early.

A transfer between processes is two ops of one number, an outgoing one where
the bytes are and an incoming one where they go. Here the incoming one meets
its parts, whichever comes first. Any thread may call.
"""

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
import threading
import time

from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.segment import Part

MAX_OVER = 1 << 14  # numbers of ops that ended before all of them came
# Both ends are told at once, so what nobody has expected for so long comes of
# an op that ended before the last `MAX_OVER`.
EARLY_S = 60.0

Left = Callable[[], None]


@dataclass(frozen=True, eq=False)
class _Reader:
  """An op that waits; `left` of a part gives its memory back."""

  arrived: Callable[[Part, Left], None]
  failed: Callable[[Exception], None]


class Arrivals:
  """Parts by the number of their op."""

  def __init__(
    self, limit_bytes: int, clock: Callable[[], float] = time.monotonic
  ):
    """Starts with none; `limit_bytes` may have come and not moved on."""
    self._clock = clock
    self._budget = ByteBudget(limit_bytes)
    self._lock = threading.Lock()
    self._readers: dict[int, _Reader] = {}
    self._early: dict[int, list[tuple[Part, Left]]] = {}  # the oldest first
    self._since: dict[int, float] = {}  # when the first of them came
    self._over: dict[int, None] = {}
    self._first = 0

  @property
  def taken_bytes(self) -> int:
    """Came and have not moved on."""
    return self._budget.taken_bytes

  def room(self, num_bytes: int, timeout_s: float) -> bool:
    """Waits until so many bytes may come; False if they may not."""
    return self._budget.take(num_bytes, timeout_s)

  def give_back(self, num_bytes: int) -> None:
    """They did not come."""
    self._budget.give(num_bytes)

  def wants(self, number: int) -> bool:
    """Whether an op of this number may still read what comes."""
    with self._lock:
      return not self._is_over(number)

  def begin_at(self, number: int) -> None:
    """Ops before this one were for a process that is no more."""
    with self._lock:
      self._first = number
      old = [n for n in self._early if n < number]
    for each in old:
      self.forget(each)

  def expect(
    self,
    number: int,
    arrived: Callable[[Part, Left], None],
    failed: Callable[[Exception], None],
  ) -> None:
    """Gives an op all parts that come, and have come, under its number.

    Args:
      arrived: called with each part and with what gives its memory back.
      failed: called once if `fail` is.
    """
    reader = _Reader(arrived, failed)
    with self._lock:
      early, is_over = self._take_early(number), self._is_over(number)
      if not is_over:
        self._readers[number] = reader
    if is_over:
      failed(ConnectionError('it will not come'))
    for part, left in early:
      arrived(part, left)

  def landed(self, number: int, part: Part) -> None:
    """A part came, for which there was `room`; unwanted it is forgotten."""
    num_bytes = part.num_bytes

    def left() -> None:
      self._budget.give(num_bytes)

    with self._lock:
      is_over, reader = self._is_over(number), self._readers.get(number)
      if not is_over and reader is None:
        self._early.setdefault(number, []).append((part, left))
        self._since.setdefault(number, self._clock())
      stale = [*self._stale()]
    for each in stale:
      self.forget(each)
    if is_over:
      left()
    elif reader is not None:
      reader.arrived(part, left)

  def fail(self, number: int, error: Exception) -> None:
    """What is not there yet will not come."""
    with self._lock:
      reader = self._readers.pop(number, None)
    if reader is not None:
      reader.failed(error)
    self.forget(number)

  def complete(self, number: int) -> None:
    """All of the op has come and moved on."""
    with self._lock:
      self._readers.pop(number, None)

  def forget(self, number: int) -> None:
    """The op has ended: what comes later is not wanted."""
    with self._lock:
      self._readers.pop(number, None)
      self._over[number] = None
      if len(self._over) > MAX_OVER:
        del self._over[next(iter(self._over))]
      early = self._take_early(number)
    for _, left in early:
      left()

  def close(self) -> None:
    """Ends every wait for room."""
    self._budget.close()

  def _take_early(self, number: int) -> list[tuple[Part, Left]]:
    self._since.pop(number, None)
    return self._early.pop(number, [])

  def _stale(self) -> Iterator[int]:
    """Numbers of what came too early to be early."""
    before_s = self._clock() - EARLY_S
    for number in self._early:
      if self._since[number] >= before_s:
        return
      yield number

  def _is_over(self, number: int) -> bool:
    return number < self._first or number in self._over
