# SPDX-License-Identifier: Apache-2.0
"""The reader: one thread an instance that waits for dispatched results.

The owner thread dispatches and goes on; what follows when a result is there
(a completion, a move over a link) is called here, in order of dispatch, which
is the order in which the instance's devices compute. What is there when it
was dispatched (a CPU copies at once) and has nothing ahead of it is followed
up on the owner's thread: that spares a change of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
import queue
import threading

import jax


@dataclass(frozen=True, eq=False)
class Expected:
  """A result under way.

  Attributes:
    result: may not be donated.
    dispatched_s: when the owner started it.
    ready: called with when it began and ended on the devices.
    failed: called instead with what went wrong.
  """

  result: jax.Array
  dispatched_s: float
  ready: Callable[[float, float], None]
  failed: Callable[[Exception], None]


class Reader:
  """Waits for one result after another."""

  def __init__(
    self,
    name: str,
    now_s: Callable[[], float],
    on_crash: Callable[[str, BaseException], None],
  ):
    """Starts the thread; `on_crash` is called if the thread itself fails."""
    self._name = name
    self._now_s = now_s
    self._on_crash = on_crash
    self._queue: queue.SimpleQueue[Expected | None] = queue.SimpleQueue()
    self._num_queued = 0  # by the owner
    self._num_read = 0  # by the thread
    self._idle_s = 0.0  # when the devices had computed all that was read
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def expect(
    self,
    result: jax.Array,
    ready: Callable[[float, float], None],
    failed: Callable[[Exception], None],
    since_s: float | None = None,
  ) -> None:
    """Queues a result that was just dispatched. Owner thread only.

    Args:
      since_s: when it was about to be dispatched: a CPU runs small programs
        then and there.
    """
    dispatched_s = self._now_s() if since_s is None else since_s
    expected = Expected(result, dispatched_s, ready, failed)
    if self.is_idle and result.is_ready():  # pyright: ignore
      self._read(expected)  # the thread has nothing to do meanwhile
      return
    self._num_queued += 1
    self._queue.put(expected)

  @property
  def is_idle(self) -> bool:
    """Whether all that was dispatched has ended. Owner thread only."""
    return self._num_read == self._num_queued

  def now_s(self) -> float:
    """The clock that `ready` is told the time of."""
    return self._now_s()

  def restart_clock(self) -> None:
    """The clock was set to 0. Only while nothing is expected."""
    self._idle_s = 0.0

  def close(self) -> None:
    """Ends the thread after what is queued."""
    self._queue.put(None)
    self._thread.join()

  def _main(self) -> None:
    try:
      while (expected := self._queue.get()) is not None:
        self._read(expected)
        self._num_read += 1
        del expected  # its result is not kept until the next one comes
    except BaseException as error:
      self._on_crash(self._name, error)

  def _read(self, expected: Expected) -> None:
    started_s = max(expected.dispatched_s, self._idle_s)
    try:
      jax.block_until_ready(expected.result)
      self._idle_s = self._now_s()
      expected.ready(started_s, self._idle_s)
    except Exception as error:
      self._idle_s = self._now_s()
      expected.failed(error)
