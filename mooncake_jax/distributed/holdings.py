# SPDX-License-Identifier: Apache-2.0
"""What a worker holds: while nothing is under way, blocks and nothing else."""

from pathlib import Path
import resource
import threading

import jax

from mooncake_jax.blocks.segments import medium
from mooncake_jax.distributed.commands import Holdings
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.transfer.arrivals import Arrivals


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
    *(t.segment for t in tiers if medium(t.segment.name) != 'remote'),
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
