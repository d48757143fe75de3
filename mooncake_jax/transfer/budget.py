# SPDX-License-Identifier: Apache-2.0
"""Bytes that may be under way at once, so that transfer buffers stay small."""

from collections.abc import Callable
import threading


class ByteBudget:
  """A limit on bytes taken and not yet given back. Any thread may call it.

  What exceeds the whole limit is let through alone.
  """

  def __init__(
    self, limit_bytes: int, on_give: Callable[[], None] = lambda: None
  ):
    """Makes a full budget; `on_give` is called after each `give`."""
    if limit_bytes < 1:
      raise ValueError(f'{limit_bytes=} must be >= 1')
    self._limit_bytes = limit_bytes
    self._on_give = on_give
    self._changed = threading.Condition()
    self._taken_bytes = 0
    self._closed = False

  @property
  def taken_bytes(self) -> int:
    return self._taken_bytes

  def try_take(self, num_bytes: int) -> bool:
    """Takes the bytes if they are free now."""
    with self._changed:
      return self._take(num_bytes)

  def take(self, num_bytes: int, timeout_s: float | None = None) -> bool:
    """Waits until the bytes are free and takes them.

    Returns:
      False: it was closed, or they were not free within `timeout_s`.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._closed or self._fits(num_bytes), timeout_s
      )
      return not self._closed and self._take(num_bytes)

  def give(self, num_bytes: int) -> None:
    """Gives back what was taken."""
    with self._changed:
      self._taken_bytes -= num_bytes
      assert self._taken_bytes >= 0, self._taken_bytes
      self._changed.notify_all()
    self._on_give()

  def close(self) -> None:
    """Ends every `take` that waits."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  def _fits(self, num_bytes: int) -> bool:
    free_bytes = self._limit_bytes - self._taken_bytes
    return num_bytes <= free_bytes or not self._taken_bytes

  def _take(self, num_bytes: int) -> bool:
    if not self._fits(num_bytes):
      return False
    self._taken_bytes += num_bytes
    return True
