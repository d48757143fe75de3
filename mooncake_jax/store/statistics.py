# SPDX-License-Identifier: Apache-2.0
"""What the Master counted since it was made, and how full it is."""

from collections import Counter
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from mooncake_jax.blocks.segments import Medium


@dataclass
class Counts:
  """Running totals.

  Attributes:
    calls: by name of the Master's method.
    hits: leased gets by medium, in blocks.
    misses: blocks asked for that nobody had, those behind them not counted.
    put_refusals: puts that got no replica, by reason.
    stored: blocks put that were there already.
    zombies: puts and copies reclaimed after their timeout.
    lost: keys that went with a segment.
    offloaded, condemned: offloads that ended well, and badly.
  """

  calls: Counter[str] = field(default_factory=Counter)
  hits: Counter[str] = field(default_factory=Counter)
  misses: int = 0
  put_refusals: Counter[str] = field(default_factory=Counter)
  stored: int = 0
  evicted_blocks: int = 0
  evicted_bytes: int = 0
  zombies: int = 0
  lost: int = 0
  offloaded: int = 0
  condemned: int = 0


@dataclass(frozen=True)
class SegmentUse:
  """One segment now."""

  name: str
  medium: Medium
  group: str
  capacity_bytes: int
  used_bytes: int
  num_copies: int
  hits: int
  draining: bool


@dataclass(frozen=True)
class Statistics:
  """A snapshot: `counts` since the Master was made, the rest as it is now.

  Attributes:
    num_keys: blocks with a copy, readable or open.
    num_open: puts and copies under way.
    tenant_bytes: charged to each tenant.
  """

  counts: Counts
  num_keys: int
  num_open: int
  segments: tuple[SegmentUse, ...]
  tenant_bytes: dict[str, int]

  def to_dict(self) -> dict[str, Any]:
    """Plain dicts and lists, for JSON."""
    return asdict(self)
