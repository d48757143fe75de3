# SPDX-License-Identifier: Apache-2.0
"""Copies of a block from one segment to another, as tasks of the client.

While a task runs its destination is an open copy, and a block with an open
copy is never evicted or removed: so the source stays. A task not ended within
`put_timeout_s` is reclaimed like a put.
"""

from mooncake_jax.request import BlockKey
from mooncake_jax.store.objects import COMPLETE
from mooncake_jax.store.objects import Copy
from mooncake_jax.store.objects import LEAVING
from mooncake_jax.store.outcomes import CopyEnd
from mooncake_jax.store.outcomes import CopyStart
from mooncake_jax.store.outcomes import CopyTask
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.puts import Puts


class Tasks(Puts):
  """The Master's copy and move tasks, and what time alone brings."""

  def copy_start(
    self,
    key: BlockKey,
    src: str,
    dst: str,
    now_s: float,
    move: bool = False,
  ) -> CopyStart:
    """Opens a copy of a block in segment `dst`, to be written from `src`.

    A move takes the source away when it has ended: at once, or when the last
    lease on the block granted by then ends. Where `dst` has the block
    already, that is all there is to do.

    Raises:
      ValueError: an unknown segment, or src is dst.
    """
    self._counts.calls['copy_start'] += 1
    here, there = self._segment(src), self._segment(dst)
    if here is there:
      raise ValueError(f'{src=} and {dst=} must differ')
    span = self._alone(key)
    source = span.copy_in(here) if span is not None else None
    if span is None or source is None or source.state < COMPLETE:
      return CopyStart(refusal='source')
    target = span.copy_in(there)
    if target is not None:
      return self._copied_already(target, source, move, now_s)
    if there.draining:
      return CopyStart(refusal='draining')
    size = source.size_bytes
    evicted = self._make_room(there, size, size, now_s, {key})
    if there.free_bytes < size:
      return CopyStart(evicted=evicted, refusal=self._why(there, 0, size, None))
    target = self._open_copy(source, there, now_s)
    kind = 'move' if move else 'copy'
    task = CopyTask(kind, source.replica, target.replica, size)
    self._tasks[target] = task
    there.add_load(1, now_s)
    return CopyStart(task, evicted=evicted, refusal='')

  def copy_end(self, task: CopyTask, now_s: float) -> CopyEnd:
    """The bytes are at the destination: publishes it.

    Not published if the task is over: its destination was lost, timed out, or
    is leaving.
    """
    self._counts.calls['copy_end'] += 1
    target = self._find(task.dst)
    if target is None or target not in self._tasks:
      return CopyEnd(False)
    if target.segment.draining:
      return CopyEnd(False, self._forget((target,)))
    self._publish(target)
    self._settle(target, saved=True)
    if task.kind == 'offload':
      self._counts.offloaded += 1
    source = self._find(task.src)
    if task.kind != 'move' or source is None or source.state < COMPLETE:
      return CopyEnd(True)
    target.tenant, source.tenant = source.tenant, None  # the charge moves too
    return CopyEnd(True, self._part(source, now_s))

  def copy_revoke(self, task: CopyTask) -> None:
    """The copy failed: gives the destination up; ignores a task that is over.

    A block whose offload failed may be evicted without.
    """
    self._counts.calls['copy_revoke'] += 1
    target = self._find(task.dst)
    if target is not None and target in self._tasks:
      self._forget((target,))

  def drop(
    self, key: BlockKey, segment: str, now_s: float
  ) -> tuple[Evicted, ...]:
    """Takes a block's copy out of one segment, pinned or not.

    At once, or, with no new reader, when the last lease granted by now and
    all copying of the block have ended; `reap` tells of it then.
    """
    self._counts.calls['drop'] += 1
    span = self._alone(key)
    space = self._segment(segment)
    copy = span.copy_in(space) if span is not None else None
    if copy is None or copy.state < COMPLETE:
      return ()
    return self._part(copy, now_s)

  def reap(self, now_s: float) -> tuple[Evicted, ...]:
    """What time alone ends; to be called now and then.

    Puts and copies older than `put_timeout_s`, sources of moves and copies of
    leaving segments whose leases ended. Returns the replicas to drop.
    """
    self._counts.calls['reap'] += 1
    gone = self._reap_open(now_s) + self._reap_leaving(now_s)
    for name, segment in list(self._segments.items()):
      self._tidy(segment)
      if segment.draining and not segment.num_copies:
        del self._segments[name]
    return gone

  def _reap_open(self, now_s: float) -> tuple[Evicted, ...]:
    dead = [
      copy
      for copy, since_s in self._open.items()
      if now_s - since_s > self.put_timeout_s
    ]
    self._counts.zombies += sum(len(copy.keys) for copy in dead)
    return self._forget(dead)

  def _reap_leaving(self, now_s: float) -> tuple[Evicted, ...]:
    return self._forget(
      copy
      for copy, until_s in list(self._leaving.items())
      if until_s < now_s and not copy.span.is_open()
    )

  def _copied_already(
    self, target: Copy, source: Copy, move: bool, now_s: float
  ) -> CopyStart:
    if target.state == LEAVING and not target.segment.draining:
      self._stay(target)
    if target.state == LEAVING:
      return CopyStart(refusal='draining')
    gone = ()
    if move and target.state >= COMPLETE:
      gone = self._part(source, now_s)
    return CopyStart(stored=True, evicted=gone, refusal='')

  def _part(self, copy: Copy, now_s: float) -> tuple[Evicted, ...]:
    """Ends a published copy at once, or as soon as nothing holds it."""
    span = copy.span
    if span.lease_until_s < now_s and not span.is_open():
      return self._forget((copy,))
    self._leave(copy, span.lease_until_s)
    return ()
