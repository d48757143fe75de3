# SPDX-License-Identifier: Apache-2.0
"""Works under way at the backend: started, told apart, stopped."""

from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.backend import Backend
from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import owner
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.events import WorkDone
from mooncake_jax.instance.run import count_uses
from mooncake_jax.instance.run import Probe
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Work

# A fetch holds back a prefill, a handoff a decode, the others nobody.
PRIORITY = {'fetch': 0, 'handoff': 1, 'put': 2, 'put_output': 2, 'copy': 3}


class Works:
  """What a cluster has started and not yet heard the end of."""

  def __init__(self, spec: ClusterSpec, backend: Backend):
    self._spec = spec
    self._backend = backend
    self._by_id: dict[int, Work] = {}

  def __len__(self) -> int:
    return len(self._by_id)

  def start(self, work: Work) -> None:
    """Starts a work; it uses its run's pages from now on."""
    payload = work.payload
    count_uses(work, 1)
    after: tuple[int, ...] = ()
    if work.after:
      after = tuple([w.work_id for w in work.after if w.work_id is not None])
      assert len(after) == len(work.after), work
    if work.run is not None:
      work.run.works[work] = None
    if isinstance(payload, Probe):
      work.work_id = self._backend.probe(
        work.instance,
        payload.segment,
        payload.keys,
        self._backend.now_s() + self._spec.probe_timeout_s,
      )
    elif isinstance(payload, PrefillChunk):
      work.work_id = self._backend.prefill(work.instance, payload, after)
    elif isinstance(payload, DecodeBatch):
      work.work_id = self._backend.decode(
        work.instance, payload, self._spec.max_decode_steps
      )
    else:
      deadline_s = self._backend.now_s() + self._spec.transfer_timeout_s
      work.work_id = self._backend.transfer(
        payload, PRIORITY[work.step], deadline_s, after
      )
    self._by_id[work.work_id] = work

  def completed(self, completion: Completion) -> Work:
    """The work a completion is of; ended works are forgotten."""
    work = self._by_id[completion.work_id]
    if completion.done:
      del self._by_id[completion.work_id]
      count_uses(work, -1)
      if work.run is not None:
        del work.run.works[work]
    return work

  def stop(self, work: Work) -> None:
    """Asks for an early end, if the work was started."""
    if work.work_id is not None:
      self._backend.cancel(work.work_id)

  def reads_from(self, instance: str) -> bool:
    """Whether a work under way reads blocks of the instance's segments."""
    return any(
      owner(segment) == instance
      for work in self._by_id.values()
      if isinstance(work.payload, Sequence)
      for segment in _sources(work.payload)
    )

  def needs(self, instance: str) -> bool:
    """Whether a work under way is the instance's, or reads there."""
    return self.reads_from(instance) or any(
      work.instance == instance for work in self._by_id.values()
    )

  def stop_all_of(self, run: Run) -> None:
    """Asks for an early end of all works of a run."""
    for work in run.works:
      self.stop(work)


def _sources(ops: Sequence[TransferOp]) -> Iterable[str]:
  """Segments that a transfer reads from."""
  if isinstance(ops, BlockOps):
    return () if ops.are_puts else ops.segments
  return [op.src.segment for op in ops if isinstance(op.src, Replica)]


def work_done(work: Work, run: Run, completion: Completion) -> WorkDone:
  """What a timeline shows of a chunk or a transfer that ended."""
  payload = work.payload
  is_chunk = isinstance(payload, PrefillChunk)
  ops = payload if isinstance(payload, Sequence) else ()
  return WorkDone(
    completion.time_s,
    work.instance,
    *run.key,
    work.step,
    completion.status,
    completion.started_s,
    completion.spans,
    payload.start if is_chunk else 0,
    payload.stop if is_chunk else 0,
    sum(op.num_bytes for op in ops),
  )
