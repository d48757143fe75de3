# SPDX-License-Identifier: Apache-2.0
"""What an owner thread does in order, beside decoding.

A task is made on any thread and run once on the owner's. It reports through
its callbacks: from the reader's thread once its result is there, or from the
owner's where it fails or is no longer wanted.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import threading
import time
from typing import Any
from typing import Protocol

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.engine.reader import Reader
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.heads import split_heads

# Layer groups dispatched and unfinished: the device never waits for the host,
# and a copy goes ahead of all but one group that was begun before it.
MAX_GROUPS = 2


@dataclass(frozen=True, eq=False)
class Desk:
  """What the tasks of one owner thread work with.

  Attributes:
    staging: bytes of blocks copied out and not yet moved away.
    model: what computes on this pool alone.
  """

  pool: StagePool
  reader: Reader
  staging: ByteBudget
  model: MeshModel | None = None
  group_slots: threading.Semaphore = field(
    default_factory=lambda: threading.Semaphore(MAX_GROUPS)
  )


@dataclass(eq=False, slots=True)
class GatherTask:
  """Copies pages out of the pool into a block of its own.

  The owner holds it back until the staging budget has room and no decode
  work under way, and no chunk begun before it, still writes the pages.

  Attributes:
    is_released: what it waits for was named, and is done with these layers.
    priority: lower first among those held back.
    is_live: False drops it.
    begin: called right before the copy; False drops it too.
    gathered: called on the reader's thread, or the owner's, with the seconds
      that the copy took and each block's slices, whose staging bytes it gives
      back.
    num_blocks: into as many blocks of equal size.
    parts: makes the same block by block, in layer ranges that there are
      programs for; used where it can't all be copied at once.
  """

  pages: tuple[int, ...]
  start_layer: int
  stop_layer: int
  num_bytes: int
  priority: int
  is_live: Callable[[], bool]
  begin: Callable[[], bool]
  gathered: Callable[..., None]
  failed: Callable[[Exception], None]
  is_released: bool = False
  num_blocks: int = 1
  parts: Callable[[], Sequence['GatherTask']] | None = None

  def run(self, desk: Desk) -> None:
    """Dispatches the copy; its staging bytes are taken already."""
    if not self.begin():
      desk.staging.give(self.num_bytes)
      return
    what = (self.pages, self.start_layer, self.stop_layer)
    try:
      with TraceAnnotation('mooncake.copy_out'):
        begun_s = time.perf_counter()
        blocks = desk.pool.copy_out_now(*what, self.num_blocks)
        seconds = time.perf_counter() - begun_s
        block = None
        if blocks is None and self.parts is None:
          block = desk.pool.copy_out(*what)
      if blocks is not None:
        self.gathered(seconds, *blocks)
        return
    except Exception:
      desk.staging.give(self.num_bytes)
      raise
    if block is None:
      assert self.parts is not None
      _run_all(self.parts(), desk)
      return
    desk.reader.expect(
      block,
      lambda started_s, ended_s: self.gathered(
        ended_s - started_s, split_heads(block)
      ),
      lambda error: self._failed(desk, error),
    )

  def fail(self, error: Exception) -> None:
    """Reports the error."""
    self.failed(error)

  def _failed(self, desk: Desk, error: Exception) -> None:
    desk.staging.give(self.num_bytes)
    self.failed(error)


@dataclass(eq=False, slots=True)
class ScatterTask:
  """Writes an arrived block into pages of the pool.

  Attributes:
    block: makes the array on the mesh.
    local: the same in host memory by device, where it lies there.
    is_live: False drops it: its op has ended, the pages may be another's.
    done: called on the reader's thread, or the owner's, when the bytes are
      readable.
    left: called once the block's memory is free, whatever came.
  """

  pages: tuple[int, ...]
  start_layer: int
  block: Callable[[], jax.Array]
  local: Mapping[Any, np.ndarray] | None
  is_live: Callable[[], bool]
  done: Callable[[], None]
  failed: Callable[[Exception], None]
  left: Callable[[], None]

  def run(self, desk: Desk) -> None:
    """Dispatches the copy if it is still wanted."""
    if not self.is_live():
      self.left()
      return
    where = (self.pages, self.start_layer)
    if self.local is not None and desk.reader.is_idle:
      if desk.pool.copy_in_now([(*where, self.local)]):
        self.left()
        self.done()
        return
    marker = desk.pool.copy_in(*where, self.block())
    desk.reader.expect(marker, self._ready, self.fail)

  def fail(self, error: Exception) -> None:
    """Reports the error."""
    self.left()
    self.failed(error)

  def _ready(self, started_s: float, ended_s: float) -> None:
    self.left()
    self.done()


class Task(Protocol):
  """A copy out of the pool or into it."""

  def run(self, desk: Desk) -> None: ...

  def fail(self, error: Exception) -> None: ...


def _run_all(tasks: Sequence[GatherTask], desk: Desk) -> None:
  for task in tasks:
    try:
      task.run(desk)
    except Exception as error:
      task.fail(error)
