# SPDX-License-Identifier: Apache-2.0
"""DeviceBackend: the physics of JAX devices on the wall clock.

The loop thread starts works, waits for completions and nothing else: it never
blocks on a device. Each instance has an owner thread for its KV pool, a
reader that waits for results and two links (see `instance.py`); who waits
for whom among transfers stands in `transfer/book.py`, the ways they take in
`routes.py`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import time
from typing import Any

import jax

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.assign import assign_devices
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.inbox import earliest
from mooncake_jax.engine.inbox import Inbox
from mooncake_jax.engine.instance import Instance
from mooncake_jax.engine.instance import ParamsSource
from mooncake_jax.engine.routes import Routes
from mooncake_jax.engine.spec import InstanceSpec
from mooncake_jax.engine.spec import LEAST_STAGING_BYTES
from mooncake_jax.engine.tasks import PrefillTask
from mooncake_jax.model.decode import decode_step
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.request import BlockKey
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.book import TransferWork
from mooncake_jax.transfer.far import FarSegment
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.heads import join_heads
from mooncake_jax.transfer.page_copies import copy_in
from mooncake_jax.transfer.page_copies import copy_out

# Pages are copied so many at once, singly, or a block at a time.
LARGEST_COPY_PAGES = 8
# Everything that is compiled for serving.
PROGRAMS: tuple[Any, ...] = (
  prefill_chunk,
  decode_step,
  copy_out,
  copy_in,
  join_heads,
)


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
    stores: Sequence[FarSegment] = (),
  ):
    """Places parameters and pools on the devices and starts the threads.

    Args:
      layout: how KVCache is cut, the same on all instances.
      params: a tree, or what loads one onto a mesh.
      clock: seconds, never going back.
      stores: far segments of no instance; closed with the backend.

    Raises:
      ValueError: too few devices, a name given twice, or a layout that is
        not this model's.
    """
    self.layout = layout
    _check_layout(config, layout, kv_dtype)
    self._clock = clock
    self._start_s = clock()
    self._inbox = Inbox()
    self._ids = itertools.count()
    self._cancel: dict[WorkId, Callable[[], None]] = {}
    self.instances: dict[str, Instance] = {}
    self.tiers: dict[str, FarTier] = {}
    self._stores: list[FarTier] = []
    try:
      for spec, devices in zip(instances, assign_devices(instances)):
        self.instances[spec.name] = Instance(
          config,
          spec,
          devices,
          params,
          layout,
          kv_dtype,
          self.now_s,
          self._inbox.crash,
        )
    except BaseException:
      self.close()  # ends the threads of those that were made
      raise
    for instance in self.instances.values():
      if instance.ssd is not None:
        self.tiers[instance.ssd.segment.name] = instance.ssd
    self._stores = [
      FarTier(store, self._inbox.crash, LEAST_STAGING_BYTES) for store in stores
    ]
    self.tiers.update({tier.segment.name: tier for tier in self._stores})
    routes = Routes(
      self.instances, self.tiers, self.copy_sizes, layout.token_layer_bytes
    )
    self._book = TransferBook(self.now_s, routes.start, self._transfer_ended)
    routes.book = self._book

  def __enter__(self) -> 'DeviceBackend':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  @property
  def copy_sizes(self) -> tuple[int, ...]:
    """Numbers of pages that are copied at once."""
    return tuple(sorted({1, self.layout.pages_per_block, LARGEST_COPY_PAGES}))

  def now_s(self) -> float:
    """Seconds from the start of the run."""
    return self._clock() - self._start_s

  def restart_clock(self) -> None:
    """Makes now the start of the run. Only while no work is under way."""
    assert not self._inbox.has_open, 'works are under way'
    self._start_s = self._clock()
    for instance in self.instances.values():
      instance.reader.restart_clock()

  def prefill(self, instance: str, work: PrefillChunk) -> WorkId:
    """See `Backend`; what can't be computed ends as 'failed'."""
    task = PrefillTask(self._open(), work, self.now_s, self._inbox.post)
    self._cancel[task.work_id] = task.cancel
    self._at(instance).owner.post(task)
    return task.work_id

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    """See `Backend`; the step after a row's last is in the last completion."""
    task = DecodeTask(
      self._open(), batch, max_steps, self.now_s, self._inbox.post
    )
    self._cancel[task.work_id] = task.cancel
    self._at(instance).owner.post(task)
    return task.work_id

  def transfer(
    self, ops: tuple[TransferOp, ...], priority: int, deadline_s: float
  ) -> WorkId:
    """See `Backend`."""
    work = TransferWork(self._open(), priority, deadline_s)
    self._cancel[work.work_id] = lambda: self._book.cancel(work.work_id)
    self._book.add(work, ops)
    return work.work_id

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    """See `Backend`; ops that are writing them end as 'failed'."""
    self._book.fail_writers(replicas)
    for replica in replicas:
      if tier := self.tiers.get(replica.segment):
        tier.drop([replica])
      else:
        self._at(replica.segment).segment.drop([replica.replica_id])

  def adopt(self, instance: str) -> list[tuple[BlockKey, int]]:
    """Blocks that an earlier process left on the instance's SSD.

    Each is (key, bytes), readable as the first replica of segment
    '<instance>/ssd' and that key which an op or `drop` names. Blocks for as
    long as listing them takes; once, before the first transfer.
    """
    return self._at(instance).adopt()

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

  def wake(self) -> None:
    """See `Backend`. Any thread may call."""
    self._inbox.wake()

  def close(self) -> None:
    """Ends all threads; works under way are dropped."""
    for store in self._stores:
      store.close()
    for instance in self.instances.values():
      instance.close()

  def compiled_programs(self) -> int:
    """Programs this process has compiled; after `warmup` it stays the same."""
    return sum(program._cache_size() for program in PROGRAMS)

  def _open(self) -> WorkId:
    work_id = next(self._ids)
    self._inbox.open(work_id)
    return work_id

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

  def _transfer_ended(self, work: TransferWork) -> None:
    now_s = self.now_s()
    bad = next((run for run in work.runs if run.status != 'completed'), None)
    self._inbox.post(
      Completion(
        work.work_id,
        'completed' if bad is None else bad.status or 'failed',
        now_s if work.started_s is None else work.started_s,
        now_s,
        '' if bad is None else f'{bad.op}: {bad.error}',
        op_status=tuple(run.status or 'failed' for run in work.runs),
      )
    )


def _check_layout(
  config: ModelConfig, layout: KVLayout, kv_dtype: jax.typing.DTypeLike
) -> None:
  itemsize = jax.numpy.dtype(kv_dtype).itemsize
  expected = 2 * config.num_kv_heads * config.head_dim * itemsize
  if (layout.token_layer_bytes, layout.num_layers) != (
    expected,
    config.num_layers,
  ):
    raise ValueError(
      f"{layout=} is not this model's: token_layer_bytes={expected} in "
      f'{kv_dtype=}, num_layers={config.num_layers}'
    )
