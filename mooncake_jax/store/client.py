# SPDX-License-Identifier: Apache-2.0
"""The store client: put and get as steps between transfers.

It asks the Master, says which transfers to make and judges what they brought.
It holds the leases on behalf of a request: taken when the request is
submitted, renewed when its fetch starts, checked after the copy.
"""

from dataclasses import dataclass

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.request import BlockKey
from mooncake_jax.store.master import Evicted
from mooncake_jax.store.master import Master


@dataclass(frozen=True)
class Held:
  """A block of a prefix and the replica it is to be read from."""

  key: BlockKey
  replica: Replica


@dataclass(frozen=True)
class Put:
  """Replicas under way: which block, which replica, which ops write it."""

  held: tuple[Held, ...]
  ops: tuple[TransferOp, ...]
  evicted: tuple[Evicted, ...]


class StoreClient:
  """One cluster's puts and gets over one Master."""

  def __init__(self, master: Master, layout: KVLayout):
    self.master = master
    self.layout = layout

  def hold_prefix(
    self,
    keys: tuple[BlockKey, ...],
    segment: str,
    max_remote_blocks: int,
    prefer: str | None,
    now_s: float,
  ) -> tuple[Held, ...]:
    """Takes leases on the longest prefix at hand; valid for `lease_s`.

    Blocks in `segment` always serve. Up to `max_remote_blocks` others may
    come from elsewhere, from segment `prefer` where it has them. The prefix
    ends at the first block that neither gives.
    """
    held, remote = [], 0
    for key in keys:
      by_segment = {r.segment: r for r in self.master.get_replicas(key, now_s)}
      replica = by_segment.get(segment)
      if replica is None and by_segment and remote < max_remote_blocks:
        remote += 1
        replica = by_segment.get(prefer or '', next(iter(by_segment.values())))
      if replica is None:
        break
      held.append(Held(key, replica))
    return tuple(held)

  def get_ops(
    self, held: tuple[Held, ...], instance: str, pages: tuple[int, ...]
  ) -> tuple[TransferOp, ...]:
    """Reads of the held blocks into `pages`, first layers first."""
    n = self.layout.pages_per_block
    return tuple(
      TransferOp(
        block.replica,
        DevicePages(instance, self.layout.block_pages(pages, i)),
        *layers,
        self.layout.part_bytes(n, layers),
      )
      for layers in self.layout.layer_ranges
      for i, block in enumerate(held)
    )

  def arrived(
    self, held: tuple[Held, ...], completion: Completion, now_s: float
  ) -> int:
    """How many leading blocks of `held` did arrive and were theirs.

    A block counts if all its parts were read and its lease still runs.
    """
    whole = self._whole(held, completion)
    for i, block in enumerate(held):
      if not (
        whole[i] and self.master.lease_valid(block.key, block.replica, now_s)
      ):
        return i
    return len(held)

  def put(
    self,
    chain: tuple[BlockKey, ...],
    first: int,
    last: int,
    instance: str,
    pages: tuple[int, ...],
    now_s: float,
  ) -> Put:
    """Starts storing blocks [first, last) of a chain that lies in `pages`.

    Those already in the instance's segment are left out. It ends at the first
    that finds no room, since nothing after a hole is ever matched; and no
    block of the chain goes to make room for a later one.
    """
    held, evicted, places = [], [], []
    self.master.touch(chain[:first], instance)
    keep = frozenset(chain[:last])
    for i in range(first, last):
      start = self.master.put_start(
        chain[i], self.layout.block_bytes, instance, now_s, keep
      )
      evicted += start.evicted
      if start.replica is None and not start.stored:
        break
      if start.replica is not None:
        held.append(Held(chain[i], start.replica))
        places.append(DevicePages(instance, self.layout.block_pages(pages, i)))
    n = self.layout.pages_per_block
    ops = tuple(
      TransferOp(
        place, block.replica, *layers, self.layout.part_bytes(n, layers)
      )
      for layers in self.layout.layer_ranges
      for block, place in zip(held, places)
    )
    return Put(tuple(held), ops, tuple(evicted))

  def put_done(
    self, held: tuple[Held, ...], completion: Completion
  ) -> tuple[list[Held], list[Held]]:
    """Publishes what was written whole; returns (published, revoked)."""
    published, revoked = [], []
    for block, whole in zip(held, self._whole(held, completion)):
      if whole and self.master.put_end(block.key, block.replica):
        published.append(block)
      else:
        self.master.put_revoke(block.key, block.replica)
        revoked.append(block)
    return published, revoked

  def _whole(
    self, held: tuple[Held, ...], completion: Completion
  ) -> list[bool]:
    """For each held block, whether every one of its parts completed."""
    status = completion.op_status
    n = len(held)
    if completion.status != 'completed' and not status:
      return [False] * n
    assert len(status) == n * len(self.layout.layer_ranges), len(status)
    return [all(s == 'completed' for s in status[i::n]) for i in range(n)]
