# SPDX-License-Identifier: Apache-2.0
"""What belongs together, and then decode instances go on.

What one completion or command causes is carried out whole before steps are
started: else a page that the first of two ended rows gives back would start
steps of the second.
"""

from collections.abc import Callable
from types import TracebackType


class Turn:
  """A context, entered as deep as one likes: the outermost exit goes on."""

  def __init__(self, go_on: Callable[[str], None]):
    """`go_on` is called with each instance that was stirred."""
    self._go_on = go_on
    self._depth = 0
    self._stirred: dict[str, None] = {}

  def stir(self, decode: str) -> None:
    """A decode instance is to be looked at when all else is done."""
    self._stirred[decode] = None

  def __enter__(self) -> None:
    self._depth += 1

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    try:
      while self._stirred and self._depth == 1 and kind is None:
        name = next(iter(self._stirred))
        del self._stirred[name]
        self._go_on(name)
    finally:
      self._depth -= 1
