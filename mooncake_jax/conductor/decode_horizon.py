# SPDX-License-Identifier: Apache-2.0
"""How many requests will decode at a given time (arXiv section 7.4).

System level, as in the paper: each request decodes for the same time t_d from
its first token on. The first tokens of those still in prefill are predicted.
So at time t those decode whose first token comes in (t - t_d, t].
"""

from bisect import bisect_right
from bisect import insort


class DecodeHorizon:
  """First-token times of all placed requests, in order."""

  def __init__(self):
    self._order: list[tuple[float, str]] = []
    self._first_s: dict[str, float] = {}

  def expect(self, request_id: str, first_s: float) -> None:
    """Its first token comes, or came, at this time; the last call counts."""
    self.remove(request_id)
    self._first_s[request_id] = first_s
    insort(self._order, (first_s, request_id))

  def remove(self, request_id: str) -> None:
    """It ended. Ignores one that is not there."""
    first_s = self._first_s.pop(request_id, None)
    if first_s is not None:
      place = bisect_right(self._order, (first_s, request_id)) - 1
      assert self._order[place] == (first_s, request_id), request_id
      del self._order[place]

  def decoding_at(self, time_s: float, duration_s: float) -> int:
    """Requests that decode at `time_s` if each does for `duration_s`."""
    first = bisect_right(self._order, time_s - duration_s, key=_first)
    return bisect_right(self._order, time_s, key=_first) - first

  def __len__(self) -> int:
    return len(self._order)


def _first(entry: tuple[float, str]) -> float:
  return entry[0]
