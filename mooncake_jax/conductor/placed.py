# SPDX-License-Identifier: Apache-2.0
"""A placed request as the Conductor remembers it, until it ends or expires."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import heapq

from mooncake_jax.conductor.prefill_load import Planned
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.request import TokenSegment


@dataclass(eq=False)
class Placed:
  """One try of one request.

  Attributes:
    placed_s: when.
    prefill_factor: correction that its prefill was predicted with.
    tbt_factor: the same for its TBT.
    transfers: of its prefix, as planned; none once they are known to be over.
    join_tbt_s: its TBT as predicted when its first token came, without it.
    fetched_s: when its prefix was there, where that was heard of.
    prefilled: its prefill is known to have ended.
    last_token_s: when its last token came; None before the first.
    first_token_s: when its first token came.
    segments: its tokens, up to the first preemption.
    preempted: it lost its pages at least once; what it does from then on says
      nothing about its placement.
  """

  request: Request
  placement: Placement
  placed_s: float
  prefill_factor: float
  tbt_factor: float = 1.0
  join_tbt_s: float = 0.0
  fetched_s: float = 0.0
  prefilled: bool = False
  transfers: Sequence[Planned] = ()
  segments: list[TokenSegment] = field(default_factory=list)
  preempted: bool = False
  first_token_s: float | None = None
  last_token_s: float | None = None


class Reservations:
  """All tries under way, by request; each expires."""

  def __init__(self):
    self._placed: dict[str, Placed] = {}
    self._expiries: list[tuple[float, str, int]] = []

  def add(self, placed: Placed, expires_s: float) -> None:
    """Remembers a try until `expires_s`; one a request at a time."""
    name, attempt = placed.request.request_id, placed.placement.attempt
    assert name not in self._placed, f'request {name!r} is placed already'
    self._placed[name] = placed
    heapq.heappush(self._expiries, (expires_s, name, attempt))

  def of(self, request_id: str) -> Placed | None:
    """Its try under way, if any."""
    return self._placed.get(request_id)

  def get(self, request_id: str, attempt: int) -> Placed | None:
    """None if there is no such try under way."""
    placed = self._placed.get(request_id)
    if placed is None or placed.placement.attempt != attempt:
      return None
    return placed

  def pop(self, placed: Placed) -> None:
    del self._placed[placed.request.request_id]

  def expired(self, now_s: float) -> list[Placed]:
    """Those whose time has come; they stay until popped."""
    late = []
    while self.is_due(now_s):
      _, name, attempt = heapq.heappop(self._expiries)
      placed = self.get(name, attempt)
      if placed is not None:
        late.append(placed)
    return late

  def is_due(self, now_s: float) -> bool:
    """Whether the time of any has come, be it under way or not."""
    return bool(self._expiries) and self._expiries[0][0] <= now_s

  def __len__(self) -> int:
    return len(self._placed)

  def __contains__(self, request_id: str) -> bool:
    return request_id in self._placed

  def __iter__(self):
    return iter(list(self._placed.values()))
