# SPDX-License-Identifier: Apache-2.0
"""The Master's invariants, proved over all it knows."""

from collections import Counter

from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.objects import OPEN
from mooncake_jax.store.objects import Segment
from mooncake_jax.store.objects import Span
from mooncake_jax.store.objects import SPARE


class Checked(Ledger):
  """The Master's self-proof."""

  def check(self) -> None:
    """Raises AssertionError unless all books agree and capacities hold."""
    spans = {*self._spans.values()}
    copies = [copy for span in spans for copy in span.copies()]
    self._check_spans(spans)
    for segment in self._segments.values():
      self._check_segment(segment, [c for c in copies if c.segment is segment])
    for copy in copies:
      assert self._segments[copy.segment.name] is copy.segment
      assert (copy.state == OPEN) == (copy in self._open), copy.replicas
      assert (copy.state == LEAVING) == (copy in self._leaving), copy.replicas
    alive = set(copies)
    assert alive >= {*self._open, *self._leaving, *self._tasks}
    ids = [replica.replica_id for copy in copies for replica in copy.replicas]
    assert len(ids) == len(set(ids)), 'a replica id was used twice'
    self._check_tasks()
    self._check_quotas(alive)

  def _check_spans(self, spans: set[Span]) -> None:
    for span in spans:
      places = [copy.segment for copy in span.copies()]
      assert len(places) == len(set(places)) > 0, span.keys
      assert all(copy.span is span for copy in span.copies()), span.keys
      assert all(self._spans[key] is span for key in span.keys), span.keys
    assert sum(len(span.keys) for span in spans) == len(self._spans)
    assert set(self._bereft) <= set(self._spans)

  def _check_segment(self, segment: Segment, copies: list[Copy]) -> None:
    name = segment.name
    used = sum(copy.num_bytes for copy in copies)
    assert used == segment.used_bytes <= segment.capacity_bytes, name
    assert sum(len(copy.keys) for copy in copies) == segment.num_copies, name
    published = {copy for copy in copies if copy.state != OPEN}
    queued = list(segment.copies())
    assert len(queued) == len(published) and set(queued) == published, name
    spare = sum(c.num_bytes for c in copies if c.state >= SPARE)
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
        charged[copy.tenant] += copy.num_bytes
    assert charged == Counter(self._quotas.used)
