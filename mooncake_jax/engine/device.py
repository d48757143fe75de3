# SPDX-License-Identifier: Apache-2.0
"""DeviceBackend: the physics of JAX devices on the wall clock.

The loop thread starts works, waits for completions and nothing else: it never
blocks on a device. Each instance has an owner thread for its KV pool, a
reader that waits for results and two links (see `instance.py`); who waits
for whom among transfers stands in `transfer/book.py`, the ways they take in
`routes.py`.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import itertools
import math
import time

import jax

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import LinkUse
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.engine import programs
from mooncake_jax.engine.assign import assign_devices
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.inbox import earliest
from mooncake_jax.engine.inbox import Inbox
from mooncake_jax.engine.instance import Instance
from mooncake_jax.engine.memory import check_layout
from mooncake_jax.engine.memory import counts
from mooncake_jax.engine.memory import link_counts
from mooncake_jax.engine.memory import regions
from mooncake_jax.engine.memory import uses_since
from mooncake_jax.engine.programs import OURS
from mooncake_jax.engine.programs import PrefillPrograms
from mooncake_jax.engine.progress import Progress
from mooncake_jax.engine.routes import Routes
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spec import LEAST_STAGING_BYTES
from mooncake_jax.engine.weights import ParamsSource
from mooncake_jax.engine.weights import Weights
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.on_devices import DeviceName
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.engine import BatchId
from mooncake_jax.transfer.engine import TransferEngine
from mooncake_jax.transfer.far import FarSegment
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.far import SharedSegment
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.page_copies import copy_sizes
from mooncake_jax.transfer.prober import Prober
from mooncake_jax.transfer.prober import Question
from mooncake_jax.transfer.regions import Region
from mooncake_jax.transfer.worker import LinkCount

# Parts under way at once to another process: one is copied while another goes.
WIRE_LINES = 2


class DeviceBackend:
  """`Backend` on JAX devices; a context manager that ends its threads."""

  def __init__(
    self,
    config: ModelConfig,
    layout: KVLayout,
    instances: Sequence[InstanceSpec],
    params: ParamsSource,
    *,
    kv_dtype: jax.typing.DTypeLike = 'float32',
    clock: Callable[[], float] = time.perf_counter,
    stores: Sequence[SharedSegment] = (),
    prefill_programs: PrefillPrograms = OURS,
    wires: Sequence[FarSegment] = (),
    arrivals: Arrivals | None = None,
  ):
    """Places parameters and pools on the devices and starts the threads.

    Args:
      layout: how KVCache is cut, the same on all instances.
      params: a tree, or what loads one onto a mesh.
      clock: seconds, never going back.
      stores: far segments of no instance; closed with the backend, made or not.
      prefill_programs: what computes chunks.
      wires: into other processes; closed with the backend.
      arrivals: what those send.

    Raises:
      ValueError: too few devices, a name given twice, or a layout that is
        not this model's.
    """
    self.layout = layout
    self._clock = clock
    self._start_s = clock()
    self._inbox = Inbox()
    self._progress = Progress()
    self._ids = itertools.count()
    self._cancel: dict[WorkId, Callable[[], None]] = {}
    self.instances: dict[str, Instance] = {}
    lines = [*((s, 1) for s in stores), *((w, WIRE_LINES) for w in wires)]
    self._stores = [
      FarTier(segment, self._inbox.crash, LEAST_STAGING_BYTES, count)
      for segment, count in lines
    ]
    self._probers = {
      store.name: Prober(store, self.now_s, self._inbox.crash)
      for store in stores
    }
    weights = Weights(params)
    try:
      check_layout(config, layout, kv_dtype)
      for spec, devices in zip(instances, assign_devices(instances)):
        host = self.instances.get(spec.shares_with or '')
        self.instances[spec.name] = Instance(
          config,
          spec,
          devices,
          weights,
          layout,
          kv_dtype,
          self.now_s,
          self._inbox.crash,
          prefill_programs,
          None if host is None else host.stages[0].owner,
        )
    except BaseException:
      self.close()  # what was made, and the stores that it was given
      raise
    ssds = [i.ssd for i in self.instances.values() if i.ssd is not None]
    self.tiers = {tier.segment.name: tier for tier in (*ssds, *self._stores)}
    self._routes = Routes(
      self.instances,
      self.tiers,
      self.copy_sizes,
      layout.token_layer_bytes,
      arrivals,
    )
    self._links_before: dict[tuple[str, str], LinkCount] = {}
    self.transfers = TransferEngine(
      self.now_s, self._start_ops, partial(counts, self.instances, self.tiers)
    )
    self._book = self.transfers.book
    self._routes.use(self._book)
    for region in regions(self.instances, self._stores):
      self.transfers.register(region)
    if arrivals is not None:
      self.transfers.register(Region(ARRIVALS, 'remote'))

  def __enter__(self) -> 'DeviceBackend':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  @property
  def copy_sizes(self) -> tuple[int, ...]:
    """Numbers of pages that are copied at once."""
    return copy_sizes(self.layout)

  def now_s(self) -> float:
    """Seconds from the start of the run."""
    return self._clock() - self._start_s

  def restart_clock(self, start_s: float | None = None, at_s=0.0) -> None:
    """Makes now, or `start_s` on the clock given, `at_s` of the run; idle."""
    assert not self._inbox.has_open, 'works are under way'
    self._start_s = (self._clock() if start_s is None else start_s) - at_s
    self._links_before = link_counts(self.instances, self.tiers)
    for instance in self.instances.values():
      instance.restart_clock()

  def prefill(
    self, instance: str, work: PrefillChunk, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    """See `Backend`; what can't be computed ends as 'failed'."""
    with self._opened() as work_id:
      at = self._at(instance)
      self._progress.open(work_id, at.groups, instance)
      run = at.start_chunk(
        work_id,
        work,
        partial(self._progress.when, after, pool=instance),
        lambda layers: self._progress.parts_done(work_id, [layers]),
        partial(self._end, after),
      )
      self._cancel[work_id] = run.cancel
      return work_id

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    """See `Backend`; the step after a row's last is in the last completion."""
    with self._opened() as work_id:
      task = DecodeTask(work_id, batch, max_steps, self.now_s, self._inbox.post)
      self._cancel[work_id] = task.cancel
      self._at(instance).start_decode(task)
      return work_id

  def transfer(
    self,
    ops: Sequence[TransferOp],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    """See `Backend`."""
    with self._opened() as work_id:
      ops = tuple(ops)
      layers = [op.layers for op in ops]
      self._progress.open(work_id, layers)
      ended = partial(self._transfer_ended, work_id, after)
      batch = self.transfers.allocate_batch(len(ops), ended)
      self._cancel[work_id] = partial(self.transfers.cancel, batch)
      ops_done = partial(self._ops_done, work_id)
      first_s = math.inf if after else deadline_s
      self.transfers.submit(batch, ops, priority, first_s, after, ops_done)
      if after:
        limit = partial(self._limit, batch, deadline_s - self.now_s())
        self._progress.when(after, None, limit)
      return work_id

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    """See `Backend`; ops that are writing them end as 'failed'."""
    self._book.fail_writers(replicas)
    by_segment: dict[str, list[Replica]] = {}
    for replica in replicas:
      by_segment.setdefault(replica.segment, []).append(replica)
    for segment, gone in by_segment.items():
      if tier := self.tiers.get(segment):
        tier.drop(gone)
      else:
        self._at(segment).segment.drop([r.replica_id for r in gone])

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend`."""
    if medium(segment) != 'ssd':
      return []
    return self._at(owner(segment)).adopt()

  def probe(
    self,
    instance: str,
    segment: str,
    keys: tuple[BlockKey, ...],
    deadline_s: float,
  ) -> WorkId:
    """See `Backend`; ValueError if there is no such store."""
    self._at(instance)  # all here have one way there
    if segment not in self._probers:
      raise ValueError(f'no store {segment!r} among {list(self._probers)}')
    with self._opened() as work_id:
      self._cancel[work_id] = lambda: None
      self._probers[segment].ask(
        Question(work_id, keys, deadline_s, self._inbox.post)
      )
      return work_id

  def cancel(self, work_id: WorkId) -> None:
    """See `Backend`."""
    if work_id in self._cancel:
      self._cancel[work_id]()

  def wait(self, until_s: float | None) -> list[Completion]:
    """See `Backend`.

    Raises:
      RuntimeError: a thread of the backend ended by an error.
    """
    while True:
      self._book.expire()
      completions, woken = self._inbox.take(self._patience_s(until_s))
      if completions or woken or self._is_over(until_s):
        break
    for completion in completions:
      if completion.done:
        del self._cancel[completion.work_id]
    return completions

  def link_uses(self) -> dict[tuple[str, str], LinkUse]:
    """See `Backend`; a link leads into devices, host memory, SSD or a store."""
    return uses_since(self._links_before, self.instances, self.tiers)

  def can_be(self, instance: str, role: str) -> bool:
    """See `Sized`."""
    return self._at(instance).spec.can_be(role)

  def devices(self) -> list[DeviceName]:
    """See `OnDevices`."""
    each = [instance.devices for instance in self.instances.values()]
    return [*dict.fromkeys(itertools.chain.from_iterable(each))]

  def wake(self) -> None:
    """See `Backend`. Any thread may call."""
    self._inbox.wake()

  def close(self) -> None:
    """Ends all threads; works under way are dropped."""
    for prober in self._probers.values():
      prober.close()
    for store in self._stores:
      store.close()
    for instance in self.instances.values():
      instance.close()

  def compiled_programs(self) -> int:
    """Programs compiled here; after `warmup` it stays the same."""
    return programs.count() + sum(
      instance.num_step_programs for instance in self.instances.values()
    )

  @contextmanager
  def _opened(self) -> Iterator[WorkId]:
    """A new work; there is none if what starts it raises."""
    work_id = next(self._ids)
    self._inbox.open(work_id)
    try:
      yield work_id
    except BaseException as error:
      self._inbox.forget(work_id)
      self._progress.end(work_id, describe(error))
      self._cancel.pop(work_id, lambda: None)()
      raise

  def _at(self, name: str) -> Instance:
    if name not in self.instances:
      raise ValueError(f'no instance {name!r} among {list(self.instances)}')
    return self.instances[name]

  def _patience_s(self, until_s: float | None) -> float:
    """How long `wait` may sleep before it has something else to do."""
    if until_s is None and not self._inbox.has_open:
      return 0.0
    return earliest([until_s, self._book.next_deadline_s()]) - self.now_s()

  def _is_over(self, until_s: float | None) -> bool:
    if until_s is None:
      return not self._inbox.has_open
    return self.now_s() >= until_s

  def _start_ops(self, runs: Sequence[OpRun]) -> None:
    """Sends ops on their way; those that follow works, as these get on."""
    self._routes.start([run for run in runs if not run.work.after])
    for run in runs:
      if run.work.after:
        self._start_behind(run)

  def _start_behind(self, run: OpRun) -> None:
    """Sends an op on its way once what it waits for is done with its layers."""
    op, after = run.op, run.work.after
    pool = op.src.instance if isinstance(op.src, DevicePages) else None
    self._progress.when(after, op.layers, partial(self._go, run), pool)

  def _go(self, run: OpRun, error: str) -> None:
    if error:
      self._book.end(run, 'failed', error)
    else:
      self._routes.start([run])

  def _limit(self, batch: BatchId, left_s: float, error: str) -> None:
    """What a transfer waits for has ended: from now on its time runs."""
    self.transfers.set_deadline(batch, self.now_s() + left_s)
    self._inbox.nudge()

  def _ops_done(self, work_id: WorkId, ops: Sequence[TransferOp]) -> None:
    self._progress.parts_done(work_id, [op.layers for op in ops])

  def _transfer_ended(
    self, work_id: WorkId, after: tuple[WorkId, ...], batch: BatchId
  ) -> None:
    """On whatever thread ended the last op."""
    completion = self.transfers.completion(work_id, batch)
    self.transfers.free_batch(batch)
    self._end(after, completion)

  def _end(self, after: tuple[WorkId, ...], completion: Completion) -> None:
    """Posts a completion once the works it waits for have ended."""
    self._progress.when(after, None, partial(self._post, completion))

  def _post(self, completion: Completion, error: str) -> None:
    """Posts it, as 'failed' if a work that it waits for has failed."""
    if error:
      failed = ('failed',) * len(completion.op_status)
      completion = replace(
        completion, status='failed', error=error, op_status=failed
      )
    self._inbox.post(completion)
    self._progress.end(completion.work_id, completion.why)
