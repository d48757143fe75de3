# SPDX-License-Identifier: Apache-2.0
"""Placing: which blocks of a chain are new to a segment, and find room."""

from collections.abc import Collection
from collections.abc import Sequence

from mooncake_jax.request import BlockKey
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.offload import Offload
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.outcomes import PutChain
from mooncake_jax.store.outcomes import Refusal


class Placing(Offload):
  """What puts decide."""

  def _put(
    self,
    chain: Sequence[BlockKey],
    first: int,
    last: int,
    size_bytes: int,
    segment: str,
    now_s: float,
    keep: Collection[BlockKey] | None,
    position: int,
    tenant: str,
  ) -> PutChain:
    self._counts.calls['put_start'] += 1
    if size_bytes < 1:
      raise ValueError(f'{size_bytes=} must be >= 1')
    space = self._segment(segment)
    if space.draining:
      return self._refused(PutChain(first, refusal='draining'))
    new, evicted = self._missing(chain, first, last, space, now_s)
    evicted += self._open_room(
      space, len(new), size_bytes, now_s, chain, last, keep, tenant
    )
    room = self._num_fitting(space, len(new), size_bytes, tenant)
    stop, refusal = last, ''
    if len(new) > room:
      stop, refusal = new[room], self._why(space, room, size_bytes, tenant)
      new = new[:room]
    made = self._allocate(
      chain, new, size_bytes, space, position - first, tenant, now_s
    )
    replicas = sum([copy.replicas for copy in made], ())
    space.add_load(len(new), now_s)
    self._counts.stored += stop - first - len(new)
    put = PutChain(stop, replicas, tuple(new), tuple(evicted), refusal)
    return self._refused(put) if refusal else put

  def _refused(self, put: PutChain) -> PutChain:
    self._counts.put_refusals[put.refusal] += 1
    return put

  def _missing(
    self,
    chain: Sequence[BlockKey],
    first: int,
    last: int,
    space: Segment,
    now_s: float,
  ) -> tuple[list[int], list[Evicted]]:
    """Which blocks the segment has not; those it has are used once more."""
    new: list[int] = []
    evicted: list[Evicted] = []
    top = self._stamp = self._stamp + len(chain)
    for i, behind, span in self._along(tuple(chain), first, last):
      copy = None if span is None else span.copy_in(space)
      if copy is None:
        new += range(i, behind)
      elif copy.state == OPEN:
        if now_s - self._open[copy] > self.put_timeout_s:
          self._counts.zombies += behind - i
          evicted += self._forget((copy,))
          new += range(i, behind)
      else:
        copy.uses += 1
        copy.stamp = top - behind + 1
        if copy.state == LEAVING:
          self._stay(copy)
    return new, evicted

  def _open_room(
    self,
    space: Segment,
    num_blocks: int,
    size_bytes: int,
    now_s: float,
    chain: Sequence[BlockKey],
    last: int,
    keep: Collection[BlockKey] | None,
    tenant: str,
  ) -> list[Evicted]:
    """Evicts for as many of the blocks as the segment could ever take."""
    num_blocks = min(num_blocks, space.capacity_bytes // size_bytes)
    num_bytes = num_blocks * size_bytes
    over = self._quotas.over(tenant, num_bytes)
    limit = int(space.capacity_bytes * self.high_watermark)
    if not num_blocks or (not over and space.used_bytes + num_bytes <= limit):
      return []
    keep = frozenset(chain[:last] if keep is None else keep)
    evicted: list[Evicted] = []
    if over:
      evicted += self._make_quota(space, num_bytes, now_s, keep, tenant)
      num_blocks = self._quota_room(tenant, num_blocks, size_bytes)
      num_bytes = num_blocks * size_bytes
    evicted += self._make_room(space, num_bytes, size_bytes, now_s, keep)
    return evicted

  def _num_fitting(
    self, space: Segment, num_blocks: int, size_bytes: int, tenant: str
  ) -> int:
    """How many of the blocks find a place now."""
    fitting = min(num_blocks, space.free_bytes // size_bytes)
    return self._quota_room(tenant, fitting, size_bytes)

  def _quota_room(self, tenant: str, num_blocks: int, size_bytes: int) -> int:
    """How many of the blocks the tenant's quota admits."""
    limit = self._quotas.limits.get(tenant)
    if limit is None:
      return num_blocks
    left = max(0, limit - self._quotas.used.get(tenant, 0))
    return min(num_blocks, left // size_bytes)

  def _why(
    self, space: Segment, room: int, size_bytes: int, tenant: str | None
  ) -> Refusal:
    """Why no more than `room` blocks find a place."""
    if tenant is not None:
      if self._quota_room(tenant, room + 1, size_bytes) <= room:
        return 'quota'
    waiting = space.offloading_bytes or len(space.unsaved)
    return 'offload' if waiting else 'room'
