# SPDX-License-Identifier: Apache-2.0
"""The Master: which blocks exist, where, and which may go.

It allocates and publishes; it never touches bytes, never waits and has no
clock: `now_s` is passed in and never goes back. A put is two-phase: put_start
allocates a replica nobody can read, put_end publishes it, put_revoke gives it
up. A replica's id is never used twice, so bytes of a dropped one can't be
taken for another's. Whatever an answer lists as `evicted` is forgotten
already; the caller drops its bytes.

What holds at all times (`check` proves it): a segment's copies fit in it; a
block has at most one copy a segment; a block leased, hard pinned, or with a
copy being written loses no copy to eviction; a soft-pinned one only where
nothing else can go.

As in Mooncake Store (FAST'25 section 3.2; the store's design document).
Differs: one replica a segment and segments chosen by the caller; a soft pin
runs from put_start; order is exact, by the policy, not by sampled lease ends.
"""

import copy

from mooncake_jax.store.check import Checked
from mooncake_jax.store.gets import Gets
from mooncake_jax.store.mounts import Mounts
from mooncake_jax.store.outcomes import Evicted as Evicted
from mooncake_jax.store.outcomes import PutStart as PutStart
from mooncake_jax.store.removal import Removal
from mooncake_jax.store.statistics import SegmentUse
from mooncake_jax.store.statistics import Statistics


class Master(Mounts, Gets, Removal, Checked):
  """Metadata of all segments of one cluster.

  Each base is one part of its work over the same `ledger`.
  """

  def segments(self) -> tuple[str, ...]:
    """Names of those mounted, the leaving ones included."""
    return tuple(self._segments)

  def statistics(self) -> Statistics:
    """A snapshot; takes time in segments and in puts under way."""
    return Statistics(
      copy.deepcopy(self._counts),
      len(self._spans),
      sum(len(copy.keys) for copy in self._open),
      tuple(
        SegmentUse(
          segment.name,
          segment.medium,
          segment.group,
          segment.capacity_bytes,
          segment.used_bytes,
          segment.num_copies,
          segment.hits,
          segment.draining,
        )
        for segment in self._segments.values()
      ),
      dict(self._quotas.used),
    )
