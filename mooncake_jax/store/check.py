# SPDX-License-Identifier: Apache-2.0
"""The Master's invariants, proved over all it knows."""

from collections import Counter

from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import SPARE


class Checked(Ledger):
  """The Master's self-proof."""

  def check(self) -> None:
    """Raises AssertionError unless all books agree and capacities hold."""
    copies = [
      (key, copy)
      for key, block in self._blocks.items()
      for copy in block.copies()
    ]
    self._check_blocks()
    for segment in self._segments.values():
      self._check_segment(
        segment, [c for _, c in copies if c.segment is segment]
      )
    for key, copy in copies:
      assert copy.key == key, copy.replica
      assert self._segments[copy.replica.segment] is copy.segment
      assert (copy.state == OPEN) == (copy in self._open), copy.replica
      assert (copy.state == LEAVING) == (copy in self._leaving), copy.replica
    alive = {copy for _, copy in copies}
    assert alive >= {*self._open, *self._leaving, *self._tasks}
    ids = [copy.replica_id for _, copy in copies]
    assert len(ids) == len(set(ids)), 'a replica id was used twice'
    self._check_tasks()
    self._check_quotas(alive)

  def _check_blocks(self) -> None:
    for key, block in self._blocks.items():
      places = [copy.segment for copy in block.copies()]
      assert len(places) == len(set(places)) > 0, key
      assert all(copy.block is block for copy in block.copies()), key
    assert set(self._bereft) <= set(self._blocks)

  def _check_segment(self, segment: Segment, copies: list[Copy]) -> None:
    name = segment.name
    used = sum(copy.size_bytes for copy in copies)
    assert used == segment.used_bytes <= segment.capacity_bytes, name
    assert len(copies) == segment.num_copies, name
    published = {copy for copy in copies if copy.state != OPEN}
    queued = list(segment.copies())
    assert len(queued) == len(published) and set(queued) == published, name
    spare = sum(c.size_bytes for c in copies if c.state >= SPARE)
    assert spare == segment.spare_bytes, name
    assert segment.lower is not None or not list(segment.unsaved), name
    assert all(copy.state in (LEAVING, COMPLETE) for copy in segment.unsaved)
    if segment.draining:
      assert all(copy.state < COMPLETE for copy in copies), name
    if segment.lower is not None:
      assert self._segments[segment.lower.name] is segment.lower, name
      assert not segment.lower.draining, name

  def _check_tasks(self) -> None:
    """Sources stay, and bytes under way add up."""
    offloading: Counter[str] = Counter()
    for target, task in self._tasks.items():
      assert target.state == OPEN and target.replica == task.dst
      source = self._find(task.src)
      assert source is not None and source.state != OPEN, task
      assert source.size_bytes == target.size_bytes == task.size_bytes
      if task.kind == 'offload':
        offloading[task.src.segment] += task.size_bytes
    for name, segment in self._segments.items():
      assert segment.offloading_bytes == offloading[name], name

  def _check_quotas(self, copies: set[Copy]) -> None:
    charged: Counter[str] = Counter()
    for copy in copies:
      if copy.tenant is not None:
        charged[copy.tenant] += copy.size_bytes
    assert charged == Counter(self._quotas.used)
