# SPDX-License-Identifier: Apache-2.0
"""Puts: two-phase, one block or a chain's new blocks in one call."""

from collections.abc import Collection
from collections.abc import Sequence

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.outcomes import Pin
from mooncake_jax.store.outcomes import PutChain
from mooncake_jax.store.outcomes import PutStart
from mooncake_jax.store.pins import pin_end_s
from mooncake_jax.store.placing import Placing


class Puts(Placing):
  """The Master's puts."""

  def put_start(
    self,
    key: BlockKey,
    size_bytes: int,
    segment: str,
    now_s: float,
    keep: Collection[BlockKey] = (),
    *,
    position: int = 0,
    pin: Pin = 'none',
    soft_pin_ttl_s: float | None = None,
    tenant: str = '',
  ) -> PutStart:
    """Allocates an unpublished replica in `segment`, evicting if need be.

    Args:
      size_bytes: of the block, at least 1.
      keep: blocks that are not evicted for it: its own chain, whose heads are
        worth more than this tail.
      position: of the block in its chain, in blocks.
      pin: 'soft' is evicted only where nothing else can go, 'hard' never.
        A put pins a block, all its copies, also where it is stored already.
      soft_pin_ttl_s: how long from now a soft pin holds; gets do not extend
        it.
      tenant: charged for the replica until it is gone. Over its quota, its
        own blocks in the segment go first.

    Raises:
      ValueError: an unknown segment, or an argument out of range.
    """
    until_s = pin_end_s(pin, soft_pin_ttl_s, now_s)
    chain = (key,)
    made = self._put(
      chain, 0, 1, size_bytes, segment, now_s, keep, position, tenant
    )
    self._pin_all(chain[: made.stop], until_s)
    return PutStart(
      made.replicas[0] if made.replicas else None,
      made.stop == 1 and not made.replicas,
      made.evicted,
      made.refusal,
    )

  def put_start_chain(
    self,
    chain: Sequence[BlockKey],
    first: int,
    last: int,
    size_bytes: int,
    segment: str,
    now_s: float,
    *,
    pin: Pin = 'none',
    soft_pin_ttl_s: float | None = None,
    tenant: str = '',
  ) -> PutChain:
    """put_start for blocks [first, last) of a chain of equal blocks.

    It ends at the first that finds no room, since nothing after a hole is
    ever matched; no block of chain[:last] goes to make room for another.
    """
    until_s = pin_end_s(pin, soft_pin_ttl_s, now_s)
    made = self._put(
      chain, first, last, size_bytes, segment, now_s, None, first, tenant
    )
    self._pin_all(chain[first : made.stop], until_s)
    return made

  def put_end(self, key: BlockKey, replica: Replica) -> bool:
    """Publishes a replica whose bytes are all there; False if it is gone."""
    assert replica.key == key, replica
    return self.put_end_chain((replica,))[0]

  def put_end_chain(self, replicas: Sequence[Replica]) -> tuple[bool, ...]:
    """put_end for each; what its segment left meanwhile is forgotten."""
    self._counts.calls['put_end'] += 1
    ended: list[bool] = []
    replicas = tuple(replicas)
    while len(ended) < len(replicas):
      first = len(ended)
      copy = self._find(replicas[first])
      if (
        copy is None
        or copy.state != OPEN
        or copy.segment.draining
        or copy in self._tasks
        or copy.replicas != replicas[first : first + len(copy.keys)]
      ):
        ended.append(self._end(replicas[first]))
        continue
      self._publish(copy)
      ended += [True] * len(copy.keys)
    return tuple(ended)

  def put_revoke(self, key: BlockKey, replica: Replica) -> None:
    """Gives up a replica that was not published; ignores one that is gone.

    Raises:
      ValueError: it was published.
    """
    assert replica.key == key, replica
    self._counts.calls['put_revoke'] += 1
    copy = self._find_alone(replica)
    if copy is None:
      return
    if copy.state != OPEN:
      raise ValueError(f'put_revoke of published {replica=}')
    self._forget((copy,))

  def adopt(
    self,
    key: BlockKey,
    size_bytes: int,
    segment: str,
    position: int = 0,
  ) -> Replica | None:
    """Publishes a block found on a medium that outlived its Master.

    Nobody is charged and nothing is evicted for it.

    Returns:
      Its replica; that of the segment if it has the block already; None if
      there is no room or the segment is leaving.
    """
    self._counts.calls['adopt'] += 1
    if size_bytes < 1:
      raise ValueError(f'{size_bytes=} must be >= 1')
    space = self._segment(segment)
    span = self._alone(key)
    copy = span.copy_in(space) if span is not None else None
    if copy is not None:
      return copy.replica if copy.state >= COMPLETE else None
    if space.draining or size_bytes > space.free_bytes:
      return None
    (copy,) = self._allocate(
      (key,), (0,), size_bytes, space, position, None, 0.0
    )
    copy.uses = 0
    self._publish(copy)
    return copy.replica

  def _end(self, replica: Replica) -> bool:
    copy = self._find_alone(replica)
    if copy is None:
      return False
    if copy.state == OPEN:
      if copy in self._tasks:
        raise ValueError(f'put_end of {replica=}, which a copy task writes')
      if copy.segment.draining:
        self._forget((copy,))
        return False
      self._publish(copy)
    return True
