# SPDX-License-Identifier: Apache-2.0
"""What a worker holds: while nothing is under way, blocks and nothing else."""

from pathlib import Path
import resource
import threading
from typing import NamedTuple

import jax

from mooncake_jax.blocks.segments import WIRE
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.transfer.arrivals import Arrivals


class Holdings(NamedTuple):
  """Of one process, now.

  Attributes:
    num_works: under way.
    buffer_bytes: of transfers: arrived, staged or read, and not moved on.
    segment_bytes: of blocks, by segment.
    num_threads, num_arrays, rss_bytes: of the process; arrays on devices or
      pinned.
  """

  num_works: int
  buffer_bytes: int
  segment_bytes: dict[str, int]
  num_threads: int
  num_arrays: int
  rss_bytes: int


def holdings_of(
  backend: DeviceBackend, arrivals: Arrivals, num_works: int
) -> Holdings:
  """What the process of this backend holds."""
  instances, tiers = backend.instances.values(), backend.tiers.values()
  budgets = [
    *(i.staging for i in instances),
    *(i.arrived for i in instances),
    *(tier.read_bytes for tier in tiers),
  ]
  segments = [
    *(i.segment for i in instances),
    *(t.segment for t in tiers if not t.segment.name.endswith(WIRE)),
  ]
  pages = int(Path('/proc/self/statm').read_text().split()[1])
  return Holdings(
    num_works,
    arrivals.taken_bytes + sum(budget.taken_bytes for budget in budgets),
    {segment.name: segment.used_bytes for segment in segments},
    threading.active_count(),
    len(jax.live_arrays()),
    pages * resource.getpagesize(),
  )
