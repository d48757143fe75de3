# SPDX-License-Identifier: Apache-2.0
"""What happens to a cluster while it serves, as values that configs bind.

Instances are lost, drain, join and change roles, memory is wiped, nodes and
links get slow, clients go away: at given times, so that a run repeats. On
devices too, but for what only a simulation can do. That the Conductor is told
late is `conductor.telemetry`; arrivals that jitter, and other rates and
lengths, are `workload.scale`.
"""

from dataclasses import dataclass
import hashlib
import math
from typing import get_args
from typing import Literal

from mooncake_jax.backend import Slowable
from mooncake_jax.cluster import Cluster
from mooncake_jax.costs.model import check_positive
from mooncake_jax.request import Request

What = Literal[
  'lose', 'drain', 'join', 'prefill', 'decode', 'wipe', 'slow', 'cancel'
]


@dataclass(frozen=True)
class Change:
  """One thing that happens.

  Attributes:
    at_s: from the start of the run.
    what: 'lose', 'drain' or 'join' an instance, make it one of role 'prefill'
      or 'decode', 'wipe' a segment, 'cancel' a request, or 'slow' an instance,
      which only a simulation can.
    whom: the instance, segment or request.
    compute, links: what 'slow' does: computing there, and what moves to and
      from there, takes so many times its own seconds; 1.0 undoes it. Work that
      has begun goes on as it was.

  Raises:
    ValueError: a time below 0, an unknown `what`, a factor not above 0.
  """

  at_s: float
  what: What
  whom: str
  compute: float = 1.0
  links: float = 1.0

  def __post_init__(self):
    check_positive('Change.at_s', self.at_s, zero=True)
    check_positive('Change.compute', self.compute)
    check_positive('Change.links', self.links)
    if self.what not in get_args(What):
      raise ValueError(
        f'Change.what={self.what!r} is not one of {", ".join(get_args(What))}'
      )

  def happen(self, cluster: Cluster) -> None:
    """Does it.

    Raises:
      ValueError: there is no such instance or segment, or it can't be now.
    """
    match self.what:
      case 'lose':
        cluster.lose(self.whom)
      case 'drain':
        cluster.drain(self.whom)
      case 'join':
        cluster.join(self.whom)
      case 'prefill' | 'decode':
        cluster.set_role(self.whom, self.what)
      case 'wipe':
        cluster.lose_segment(self.whom)
      case 'cancel':
        cluster.cancel(self.whom)
      case 'slow':
        self._slow(cluster)

  def _slow(self, cluster: Cluster) -> None:
    known = {*cluster.prefill, *cluster.decode}
    if self.whom not in known:
      raise ValueError(
        f'Change.whom={self.whom!r} is not one of {sorted(known)}'
      )
    if not isinstance(cluster.backend, Slowable):
      raise ValueError(
        f"Change.what='slow' of {self.whom!r} needs a simulation"
      )
    cluster.backend.slow(self.whom, self.compute, self.links)


@dataclass(frozen=True)
class Changes:
  """All that happens in a run.

  Attributes:
    changes: in any order.
    cancel_share: of the requests' clients so many go away before the end,
      those whose answers take that long.
    cancel_after_s: from a request's arrival to then, in the mean; exponential.
    seed: of who goes and when; each request's own, whatever else happens.

  Raises:
    ValueError: a share outside [0, 1], a time that is not above 0.
  """

  changes: tuple[Change, ...] = ()
  cancel_share: float = 0.0
  cancel_after_s: float = 10.0
  seed: int = 0

  def __post_init__(self):
    if not 0 <= self.cancel_share <= 1:
      raise ValueError(
        f'Changes.cancel_share={self.cancel_share!r} must be in [0, 1]'
      )
    check_positive('Changes.cancel_after_s', self.cancel_after_s)

  def of(self, request: Request) -> Change | None:
    """When its client goes away, if it does."""
    if not self.cancel_share:
      return None
    text = f'{self.seed} {request.request_id}'.encode()
    drawn = hashlib.sha256(text).digest()
    if _share(drawn[:8]) >= self.cancel_share:
      return None
    after_s = -self.cancel_after_s * math.log(1 - _share(drawn[8:16]))
    return Change(request.arrival_s + after_s, 'cancel', request.request_id)


NOTHING = Changes()


def _share(word: bytes) -> float:
  """A number in [0, 1) of 8 bytes."""
  return (int.from_bytes(word, 'big') >> 11) / 2**53
