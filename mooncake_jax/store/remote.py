# SPDX-License-Identifier: Apache-2.0
"""What the Master believes of a store that other processes share.

A Mooncake Store, segment 'mooncake', belongs to nobody here: others put blocks
into it and it evicts by itself, without a word. So the Master's inventory of
it is a belief: it learns of blocks by probing and by putting them, forgets
those that a probe or a read does not find, and never lets a block go from
other media because the store is believed to have it.
"""

from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.request import BlockKey
from mooncake_jax.store.master import Master
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted


class RemoteBeliefs:
  """The Master's side of the remote segment."""

  def __init__(self, master: Master, block_bytes: int):
    self._master = master
    self._block_bytes = block_bytes

  def first_unsure(self, keys: Sequence[BlockKey], instance: str) -> int:
    """The first block that none of the instance's own media has."""
    for i, key in enumerate(keys):
      if not any(owner(r.segment) == instance for r in self._master.peek(key)):
        return i
    return len(keys)

  def told(
    self,
    chain: tuple[BlockKey, ...],
    first: int,
    present: int,
    now_s: float,
  ) -> tuple[tuple[Replica, ...], tuple[Evicted, ...]]:
    """The store has `present` blocks of chain[first:] and not the next.

    Returns:
      Replicas that are new, and those that are forgotten: for lack of room,
      or as the store has them no more.
    """
    stop = first + present
    put = self._master.put_start_chain(
      chain, first, stop, self._block_bytes, REMOTE, now_s
    )
    self._master.put_end_chain(put.replicas)
    gone = list(put.evicted)
    for replica in self._master.peek(chain[stop]) if chain[stop:] else ():
      if replica.segment == REMOTE:
        gone += self._master.discard(replica)
    return put.replicas, tuple(gone)

  def copies(
    self, keys: Iterable[BlockKey], instance: str, now_s: float
  ) -> tuple[tuple[CopyTask, ...], tuple[Evicted, ...]]:
    """Opens copies there of blocks that lie on the instance's media."""
    tasks: list[CopyTask] = []
    evicted: list[Evicted] = []
    for key in keys:
      source = self._source(key, instance)
      if source is not None:
        start = self._master.copy_start(key, source.segment, REMOTE, now_s)
        evicted += start.evicted
        tasks += [start.task] if start.task is not None else []
    return tuple(tasks), tuple(evicted)

  def lacks(self, key: BlockKey, instance: str, min_uses: int) -> bool:
    """Whether a block of the instance, used so often, is not known there."""
    copies = self._master.peek(key)
    uses = (
      self._master.uses(r) for r in copies if owner(r.segment) == instance
    )
    return (
      max(uses, default=0) >= min_uses
      and all(r.segment != REMOTE for r in copies)
      and self._source(key, instance) is not None
    )

  def _source(self, key: BlockKey, instance: str) -> Replica | None:
    """Where it is read from: host memory before SSD, never a device."""
    near = [
      replica
      for replica in self._master.peek(key)
      if owner(replica.segment) == instance
      and medium(replica.segment) != 'device'
    ]
    return min(near, key=lambda r: medium(r.segment), default=None)
