# SPDX-License-Identifier: Apache-2.0
"""VirtualBackend: work takes what a cost model says, on a virtual clock.

`wait` jumps to the next completion. A prefill instance and each direction of
each link serve one work after another; a decode work's steps are computed in
closed form, its step time taken as linear between its first and last step
(exact for costs linear in the context). No wall clock, no randomness: the
same calls give the same completions.

Differs from devices: a prefill or transfer that was started is not cancelled,
and transfers of one link keep their order whatever their priority.
"""

from collections import defaultdict
from dataclasses import dataclass
import heapq
import itertools
import math
from typing import NamedTuple

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import RowTokens
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.segments import Medium
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.request import BlockKey
from mooncake_jax.request import TokenSegment


@dataclass
class _Decoding:
  """A decode work under way: step k of num_steps ends at step_end_s(k)."""

  batch: DecodeBatch
  start_s: float
  first_s: float
  interval_s: float
  num_steps: int

  def step_end_s(self, step: int) -> float:
    return self.first_s + (step - 1) * self.interval_s

  def steps_by(self, time_s: float) -> int:
    """Steps until the first boundary at or after time_s; at least one."""
    if not self.interval_s or time_s <= self.first_s:
      return 1
    # The small slack keeps a boundary hit exactly from rounding up.
    late = (time_s - self.first_s) / self.interval_s - 1e-9
    return min(1 + math.ceil(late), self.num_steps)


class VirtualBackend:
  """Backend on cost models; see the module's docstring."""

  def __init__(self, costs: CostModel):
    """Starts at time 0 with `costs` as the truth."""
    self._costs = costs
    self._now_s = 0.0
    self._ids = itertools.count()
    self._free_s: dict[tuple[str, str], float] = defaultdict(float)
    self._ends: list[tuple[float, WorkId]] = []
    self._done: dict[WorkId, Completion] = {}
    self._ops: dict[WorkId, tuple[TransferOp, ...]] = {}
    self._decoding: dict[WorkId, _Decoding] = {}
    # The layers of each replica that are there, a bit each.
    self._layers: dict[Replica, int] = defaultdict(int)

  def now_s(self) -> float:
    return self._now_s

  def prefill(
    self, instance: str, work: PrefillChunk, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    assert not after, 'nothing is started ahead of what it needs yet'
    seconds = self._costs.prefill_s(work.stop - work.start, work.start)
    start_s, end_s = self._occupy(('prefill', instance), seconds)
    return self._end(Completion(next(self._ids), 'completed', start_s, end_s))

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    num_rows = len(batch.rows)
    num_steps = min(max_steps, min(row.remaining for row in batch.rows))
    context = sum(row.position + 1 for row in batch.rows)
    first_step_s = self._costs.decode_step_s(num_rows, context)
    last_step_s = self._costs.decode_step_s(
      num_rows, context + (num_steps - 1) * num_rows
    )
    total_s = num_steps * (first_step_s + last_step_s) / 2
    interval_s = (
      (total_s - first_step_s) / (num_steps - 1) if num_steps > 1 else 0.0
    )
    work_id = next(self._ids)
    work = _Decoding(
      batch, self._now_s, self._now_s + first_step_s, interval_s, num_steps
    )
    self._decoding[work_id] = work
    heapq.heappush(self._ends, (work.step_end_s(num_steps), work_id))
    return work_id

  def transfer(
    self,
    ops: tuple[TransferOp, ...],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    assert not after, 'nothing is started ahead of what it needs yet'
    num_bytes: dict[tuple[Link, str], int] = defaultdict(int)
    for op in ops:
      num_bytes[_link(op)] += op.num_bytes
    spans = [
      self._occupy((link, owner), self._costs.transfer_s(count, link))
      for (link, owner), count in num_bytes.items()
    ]
    start_s = min((s for s, _ in spans), default=self._now_s)
    end_s = max((e for _, e in spans), default=self._now_s)
    work_id = next(self._ids)
    self._ops[work_id] = ops
    late = end_s > deadline_s
    return self._end(
      Completion(
        work_id,
        'timeout' if late else 'completed',
        start_s,
        max(min(end_s, deadline_s), self._now_s),
      )
    )

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    for replica in replicas:
      self._layers.pop(replica, None)

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """Nothing outlives a simulation."""
    return []

  def cancel(self, work_id: WorkId) -> None:
    work = self._decoding.get(work_id)
    if work is None:
      return
    num_steps = work.steps_by(self._now_s)
    if num_steps < work.num_steps:
      work.num_steps = num_steps
      heapq.heappush(self._ends, (work.step_end_s(num_steps), work_id))

  def wait(self, until_s: float | None) -> list[Completion]:
    completions: list[Completion] = []
    while self._ends:
      end_s, work_id = self._ends[0]
      if completions and end_s > self._now_s:
        break
      if until_s is not None and end_s > until_s:
        break
      heapq.heappop(self._ends)
      completion = self._finish(work_id, end_s)
      if completion is not None:
        self._now_s = max(self._now_s, end_s)
        completions.append(completion)
    if not completions and until_s is not None:
      self._now_s = max(self._now_s, until_s)
    return completions

  def wake(self) -> None:
    """Nothing to wake: wait never blocks."""

  def _occupy(
    self, resource: tuple[str, str], seconds: float
  ) -> tuple[float, float]:
    start_s = max(self._now_s, self._free_s[resource])
    self._free_s[resource] = start_s + seconds
    return start_s, start_s + seconds

  def _end(self, completion: Completion) -> WorkId:
    self._done[completion.work_id] = completion
    heapq.heappush(self._ends, (completion.time_s, completion.work_id))
    return completion.work_id

  def _finish(self, work_id: WorkId, end_s: float) -> Completion | None:
    """The completion due; None for an end that a cancel made obsolete."""
    work = self._decoding.get(work_id)
    if work is not None:
      del self._decoding[work_id]
      return self._decoded(work_id, work)
    completion = self._done.pop(work_id, None)
    if completion is None or work_id not in self._ops:
      return completion
    return self._moved(completion, self._ops.pop(work_id))

  def _decoded(self, work_id: WorkId, work: _Decoding) -> Completion:
    segment = TokenSegment(work.first_s, work.interval_s, work.num_steps)
    rows = tuple(
      RowTokens(row.request_id, row.attempt, segment) for row in work.batch.rows
    )
    return Completion(
      work_id,
      'completed',
      work.start_s,
      work.step_end_s(work.num_steps),
      rows=rows,
    )

  def _moved(
    self, completion: Completion, ops: tuple[TransferOp, ...]
  ) -> Completion:
    """Each op's status; reads of bytes that are not there fail."""
    status: tuple[Status, ...] = tuple(
      self._move(op, completion.status) for op in ops
    )
    bad: Status | None = next((s for s in status if s != 'completed'), None)
    return Completion(
      completion.work_id,
      bad or 'completed',
      completion.started_s,
      completion.time_s,
      '' if bad is None else f'an op is {bad!r}',
      op_status=status,
    )

  def _move(self, op: TransferOp, status: Status) -> Status:
    layers = (1 << op.stop_layer) - (1 << op.start_layer)
    if status == 'completed' and isinstance(op.src, Replica):
      if layers & ~self._layers[op.src]:
        return 'failed'
    if status == 'completed' and isinstance(op.dst, Replica):
      self._layers[op.dst] |= layers
    return status


def _link(op: TransferOp) -> tuple[Link, str]:
  """The link an op crosses and the instance whose end of it is busy."""
  src, dst = _end(op.src), _end(op.dst)
  match src.medium, dst.medium:
    case 'device', 'device':
      return 'handoff', src.owner
    case _, 'ssd':
      return 'ssd_write', dst.owner
    case 'ssd', _:
      return 'ssd_read', src.owner
    case _, 'remote':
      return 'remote_write', src.owner
    case 'remote', _:
      return 'remote_read', dst.owner
    case 'device', _:
      return 'offload', src.owner
    case _ if src.owner != dst.owner:
      return 'copy', src.owner
  return 'onload', src.owner


class _End(NamedTuple):
  medium: Medium
  owner: str


def _end(place: DevicePages | Replica) -> _End:
  if isinstance(place, DevicePages):
    return _End('device', place.instance)
  return _End(medium(place.segment), owner(place.segment))
