# SPDX-License-Identifier: Apache-2.0
"""Blocks whose pages stay on the device after their run: a hit moves nothing.

The device's own segment, 'prefill0/device', is a tier like the others: the
Master says which blocks it has and which go. Its bytes are pages of the
instance's pool. A block that went while a run still reads its pages gives
them back when the run does.
"""

from collections import Counter
from collections.abc import Iterable

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.pool import PagePool
from mooncake_jax.blocks.segments import device_segment
from mooncake_jax.instance.run import Effects
from mooncake_jax.request import BlockKey
from mooncake_jax.store.master import Master


class DeviceCache:
  """Who shares which pages of one instance's pool."""

  def __init__(
    self, instance: str, master: Master, layout: KVLayout, pool: PagePool
  ):
    self.segment = device_segment(instance)
    self._master = master
    self._layout = layout
    self.pool = pool
    self._pages: dict[Replica, tuple[int, ...]] = {}
    self._readers: Counter[Replica] = Counter()
    self._gone: set[Replica] = set()

  def share(self, replicas: Iterable[Replica]) -> tuple[int, ...]:
    """The blocks' pages, to be read until `unshare`."""
    pages: tuple[int, ...] = ()
    for replica in replicas:
      self._readers[replica] += 1
      pages += self._pages[replica]
    return pages

  def unshare(self, replicas: Iterable[Replica]) -> None:
    """Ends a `share`."""
    for replica in replicas:
      self._readers[replica] -= 1
      if not self._readers[replica]:
        del self._readers[replica]
        if replica in self._gone:
          self._gone.remove(replica)
          self.pool.release(self._pages.pop(replica))

  def keep(
    self,
    chain: tuple[BlockKey, ...],
    num_blocks: int,
    pages: tuple[int, ...],
    now_s: float,
  ) -> tuple[frozenset[int], Effects]:
    """Takes over the pages of a chain's first blocks, as far as there is room.

    Returns:
      The pages that the cache holds from now on, and what to tell.
    """
    put = self._master.put_start_chain(
      chain, 0, num_blocks, self._layout.block_bytes, self.segment, now_s
    )
    kept: tuple[int, ...] = ()
    for replica, i in zip(put.replicas, put.indices):
      self._pages[replica] = self._layout.block_pages(pages, i)
      kept += self._pages[replica]
    self._master.put_end_chain(put.replicas)
    self._master.touch(chain[:num_blocks], self.segment)
    for evicted in put.evicted:
      self._evict(evicted.replica)
    events = self._master.events
    gone = (evicted.replica for evicted in put.evicted)
    effects: Effects = [
      *events.evicted(gone, now_s),
      *events.stored(put.replicas, now_s),
    ]
    return frozenset(kept), effects

  def clear(self) -> None:
    """Lets go of all blocks: the Master knows them no more."""
    for replica in [r for r in self._pages if r not in self._gone]:
      self._evict(replica)

  def num_kept(self, shared: tuple[Replica, ...], num_blocks: int) -> int:
    """Blocks up to the first whose pages are still a gone replica's."""
    gone = (i for i, r in enumerate(shared) if r in self._gone)
    return next(gone, num_blocks)

  @property
  def num_pages(self) -> int:
    """Pages of the pool that the cache holds."""
    return sum(map(len, self._pages.values()))

  def check(self) -> None:
    """Raises AssertionError unless the Master and the pages agree."""
    mounted = self.segment in self._master.segments()
    known = set(self._master.inventory(self.segment) if mounted else ())
    held = {r.key for r in self._pages if r not in self._gone}
    assert known == held, self.segment
    assert self._gone <= set(self._readers), self.segment

  def _evict(self, replica: Replica) -> None:
    if replica in self._readers:
      self._gone.add(replica)
    else:
      self.pool.release(self._pages.pop(replica))
