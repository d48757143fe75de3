# SPDX-License-Identifier: Apache-2.0
"""A virtual clock and what is due on it, in order of time, then of asking."""

from collections.abc import Callable
from collections.abc import Sized
import heapq
import itertools
import math
from typing import Any

# [time_s, order, call, args]; `call` is None once dropped. A list, since it
# is changed in place and compared by its first two.
Due = list[Any]


class Clock:
  """Jumps from one due call to the next."""

  def __init__(self):
    self.now_s = 0.0
    self._due: list[Due] = []
    self._order = itertools.count()

  @property
  def next_s(self) -> float | None:
    """When the next is due, be it dropped or not; None if none is."""
    return self._due[0][0] if self._due else None

  def at(self, time_s: float, call: Callable[..., None], *args: Any) -> Due:
    """Calls at `time_s`, or now if that is past; returns what `drop` takes."""
    if time_s < self.now_s:
      time_s = self.now_s
    due = [time_s, next(self._order), call, args]
    heapq.heappush(self._due, due)
    return due

  def drop(self, due: Due) -> None:
    """Forgets a call: time does not even stop for it."""
    due[2], due[3] = None, ()

  def run(self, until_s: float | None, found: Sized) -> None:
    """Makes calls by `until_s`, and when there is something in `found` only
    those that are due by then.
    """
    due, pop = self._due, heapq.heappop
    last_s = math.inf if until_s is None else until_s
    while due and due[0][0] <= (self.now_s if found else last_s):
      time_s, _, call, args = pop(due)
      if call is not None:
        if time_s > self.now_s:
          self.now_s = time_s
        call(*args)
