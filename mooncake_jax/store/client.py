# SPDX-License-Identifier: Apache-2.0
"""The store client: puts, gets and offloads as steps between transfers.

It asks the Master, says which transfers to make and judges what they brought.
It holds the leases on behalf of a request: taken when the request is
submitted, renewed when its fetch starts, checked after the copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import blocks_by_segment
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import device_segment
from mooncake_jax.blocks.segments import is_near
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.request import BlockKey
from mooncake_jax.store.master import Master
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.remote import RemoteBeliefs


class Put(NamedTuple):
  """Replicas to be written by `ops`, and what went to make room for them.

  Attributes:
    stop: the first block that got no place; the end of what was asked else.
    comes_too_fast: that is so because offloads have to end first.
  """

  replicas: tuple[Replica, ...]
  ops: Sequence[TransferOp]
  evicted: tuple[Evicted, ...]
  stop: int
  comes_too_fast: bool


@dataclass(frozen=True)
class Copies:
  """Copies between segments to be made by `ops`, and what made room."""

  tasks: tuple[CopyTask, ...]
  ops: Sequence[TransferOp]
  evicted: tuple[Evicted, ...]


class StoreClient:
  """One cluster's puts and gets over one Master."""

  def __init__(self, master: Master, layout: KVLayout):
    self.master = master
    self.layout = layout
    self.remote = RemoteBeliefs(master, layout.block_bytes)

  def hold_prefix(
    self,
    keys: Sequence[BlockKey],
    segment: str,
    max_remote_blocks: int,
    prefer: str | None,
    now_s: float,
    share: bool = True,
  ) -> tuple[Replica, ...]:
    """Takes leases on the longest prefix at hand; valid for `lease_s`.

    Blocks on the instance's own media always serve, and those of the store
    that nobody owns. Up to `max_remote_blocks` others may come from elsewhere,
    from segment `prefer` where it has them. The prefix ends at the first block
    that neither gives. Device memory gives leading blocks to its own instance
    only, and none unless `share`.
    """
    held: list[Replica] = []
    num_remote = 0
    own_device = device_segment(segment)
    found = self.master.get_chain(
      keys, now_s, segment, prefer, max_remote_blocks
    )
    if blocks_by_segment(found).keys() <= {segment}:
      return found
    for replica in found:
      if medium(replica.segment) == 'device':
        leads = share and all(r.segment == own_device for r in held)
        if replica.segment != own_device or not leads:
          replica = self._off_device(replica.key, segment)
      if replica is None:
        break
      num_remote += not is_near(replica.segment, segment)
      if num_remote > max_remote_blocks:
        break
      held.append(replica)
    return tuple(held)

  def num_at(self, instance: str, keys: Sequence[BlockKey]) -> int:
    """Leading blocks that the instance has, on whatever medium."""
    return self.master.num_at(instance, keys)

  def lease(self, keys: Sequence[BlockKey], now_s: float) -> None:
    """Keeps what there is of a chain for `lease_s`, as no use of it."""
    self.master.lease(keys, now_s)

  def get_ops(
    self, held: Sequence[Replica], instance: str, pages: tuple[int, ...]
  ) -> BlockOps:
    """Reads of the held blocks into `pages`, first layers first."""
    place = DevicePages(instance, pages)
    return BlockOps(self.layout, place, held, range(len(held)), are_puts=False)

  def arrived(
    self, held: Sequence[Replica], completion: Completion
  ) -> tuple[int, tuple[Evicted, ...]]:
    """How many leading blocks of `held` did arrive and were theirs.

    A block counts if all its parts were read and it is still there. One
    whose bytes failed though the Master vouches for them is bad: it is
    forgotten, and is in the second answer.
    """
    if completion.status == 'completed':
      return self.master.num_valid(held), ()
    count, bad = 0, []
    for i, (replica, whole) in enumerate(
      zip(held, self._whole(held, completion))
    ):
      valid = self.master.is_valid(replica)
      if valid and whole == 'failed':
        bad += self.master.discard(replica)
      if valid and whole == 'completed' and count == i:
        count += 1
    return count, tuple(bad)

  def put(
    self,
    chain: tuple[BlockKey, ...],
    first: int,
    last: int,
    segment: str,
    pages: DevicePages,
    now_s: float,
  ) -> Put:
    """Starts storing blocks [first, last) of a chain that lies in `pages`.

    Those already in the segment are left out. It ends at the first
    that finds no room, since nothing after a hole is ever matched; and no
    block of the chain goes to make room for a later one.
    """
    self.master.touch(chain[:first], segment)
    start = self.master.put_start_chain(
      chain, first, last, self.layout.block_bytes, segment, now_s
    )
    ops = BlockOps(self.layout, pages, start.replicas, start.indices, True)
    too_fast = start.refusal == 'offload'
    return Put(start.replicas, ops, start.evicted, start.stop, too_fast)

  def put_done(
    self, replicas: Sequence[Replica], completion: Completion
  ) -> tuple[list[Replica], list[Replica]]:
    """Publishes what was written whole; returns (published, revoked)."""
    written = [*replicas]
    if completion.status != 'completed':
      status = self._whole(replicas, completion)
      written = [r for r, s in zip(replicas, status) if s == 'completed']
    kept = self.master.put_end_chain(written)
    if len(written) == len(replicas) and all(kept):
      return written, []
    published = [r for r, k in zip(written, kept) if k]
    are_kept = set(published)
    revoked = [r for r in replicas if r not in are_kept]
    for replica in revoked:
      self.master.put_revoke(replica.key, replica)
    return published, revoked

  def offload(self, segment: str, now_s: float) -> Copies:
    """Starts copies of what is evicted next to the segment's lower tier."""
    victims = self.master.victims(segment, now_s)
    return self.copies(victims.tasks, victims.evicted)

  def repair(self, now_s: float) -> Copies:
    """Starts copies of hot blocks that lost one with a segment."""
    size = self.layout.block_bytes
    tasks: list[CopyTask] = []
    evicted: list[Evicted] = []
    for wanting in self.master.under_replicated(now_s):
      target = self.master.choose_segment(wanting.key, size, now_s)
      if target is None:
        continue
      source = self._off_device(wanting.key)
      if source is None or medium(source.segment) == 'remote':
        continue  # who reads it there puts it here
      start = self.master.copy_start(wanting.key, source.segment, target, now_s)
      evicted += start.evicted
      tasks += [start.task] if start.task is not None else []
    return self.copies(tuple(tasks), tuple(evicted))

  def copies(
    self, tasks: tuple[CopyTask, ...], evicted: tuple[Evicted, ...]
  ) -> Copies:
    """Copies that the Master has opened, with the transfers they take."""
    layers = (0, self.layout.num_layers)
    ops = tuple(
      TransferOp(task.src, task.dst, *layers, task.size_bytes) for task in tasks
    )
    return Copies(tasks, ops, evicted)

  def copies_done(
    self, tasks: Sequence[CopyTask], completion: Completion, now_s: float
  ) -> tuple[list[Replica], list[Replica]]:
    """Publishes the copies that were written; returns (published, revoked)."""
    published, revoked = [], []
    status = completion.op_status or (completion.status,) * len(tasks)
    for task, ended in zip(tasks, status):
      if ended == 'completed' and self.master.copy_end(task, now_s).published:
        published.append(task.dst)
      else:
        self.master.copy_revoke(task)
        revoked.append(task.dst)
    return published, revoked

  def _off_device(self, key: BlockKey, near: str = '') -> Replica | None:
    """A copy of the block in no device's memory.

    Of instance `near` first, of the store that nobody owns last.
    """
    copies = [r for r in self.master.peek(key) if medium(r.segment) != 'device']

    def distance(replica: Replica) -> tuple[bool, bool]:
      place = replica.segment
      return owner(place) != near, medium(place) == 'remote'

    return min(copies, key=distance, default=None)

  def _whole(
    self, held: Sequence[Replica], completion: Completion
  ) -> list[str]:
    """A status a block: completed if all parts are; failed if one is."""
    status, n = completion.op_status, len(held)
    if completion.status == 'completed':
      return ['completed'] * n
    if not status:
      return ['cancelled'] * n
    assert len(status) == n * len(self.layout.layer_ranges), len(status)
    return [_worst(status[i::n]) for i in range(n)]


def _worst(parts: Sequence[str]) -> str:
  for status in ('failed', 'timeout', 'cancelled'):
    if status in parts:
      return status
  return 'completed'
