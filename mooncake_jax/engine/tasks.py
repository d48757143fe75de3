# SPDX-License-Identifier: Apache-2.0
"""What an owner thread does in order, beside decoding.

A task is made on any thread and run once on the owner's. It reports through
its callbacks: from the reader's thread once its result is there, or from the
owner's where it fails or is no longer wanted.
"""

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
import threading
from typing import Any

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import WorkId
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.engine.reader import Reader
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.heads import HeadSlices
from mooncake_jax.transfer.heads import split_heads

# Chunks dispatched and unfinished: the device never waits for the host, and a
# cancel still finds most chunks undispatched.
MAX_CHUNKS = 2


@dataclass(frozen=True, eq=False)
class Desk:
  """What the tasks of one owner thread work with.

  Attributes:
    staging: bytes of blocks copied out and not yet moved away.
  """

  model: MeshModel
  reader: Reader
  staging: ByteBudget
  chunk_slots: threading.Semaphore = field(
    default_factory=lambda: threading.Semaphore(MAX_CHUNKS)
  )


@dataclass(eq=False)
class PrefillTask:
  """One chunk of one request."""

  work_id: WorkId
  chunk: PrefillChunk
  now_s: Callable[[], float]
  post: Callable[[Completion], None]
  is_cancelled: bool = False

  def cancel(self) -> None:
    """Makes it end as 'cancelled' unless it was dispatched. Any thread."""
    self.is_cancelled = True

  def run(self, desk: Desk) -> None:
    """Dispatches the chunk, waiting for a slot first."""
    desk.chunk_slots.acquire()
    if self.is_cancelled:
      desk.chunk_slots.release()
      now_s = self.now_s()
      self.post(Completion(self.work_id, 'cancelled', now_s, now_s))
      return
    try:
      with TraceAnnotation('mooncake.prefill'):
        token = desk.model.prefill(self.chunk)
    except Exception:
      desk.chunk_slots.release()
      raise
    desk.reader.expect(
      token,
      lambda started_s, ended_s: self._ready(desk, token, started_s, ended_s),
      lambda error: self._failed(desk, error),
    )

  def fail(self, error: Exception) -> None:
    """Ends the work as 'failed'."""
    now_s = self.now_s()
    self.post(Completion(self.work_id, 'failed', now_s, now_s, describe(error)))

  def _ready(
    self, desk: Desk, token: jax.Array, started_s: float, ended_s: float
  ) -> None:
    desk.chunk_slots.release()
    drawn = int(np.asarray(token)) if self.chunk.sampling else None
    self.post(
      Completion(self.work_id, 'completed', started_s, ended_s, token=drawn)
    )

  def _failed(self, desk: Desk, error: Exception) -> None:
    desk.chunk_slots.release()
    self.fail(error)


@dataclass(eq=False)
class GatherTask:
  """Copies pages out of the pool into a block of its own.

  The owner holds it back until the staging budget has room and no decode
  work under way writes the pages.

  Attributes:
    priority: lower first among those held back.
    is_live: False drops it.
    begin: called right before the copy; False drops it too.
    gathered: called on the reader's thread, or the owner's, with the block's
      slices, whose staging bytes it gives back.
  """

  pages: tuple[int, ...]
  start_layer: int
  stop_layer: int
  num_bytes: int
  priority: int
  is_live: Callable[[], bool]
  begin: Callable[[], bool]
  gathered: Callable[[HeadSlices], None]
  failed: Callable[[Exception], None]

  def run(self, desk: Desk) -> None:
    """Dispatches the copy; its staging bytes are taken already."""
    if not self.begin():
      desk.staging.give(self.num_bytes)
      return
    what = (self.pages, self.start_layer, self.stop_layer)
    try:
      with TraceAnnotation('mooncake.copy_out'):
        slices = desk.model.copy_out_now(*what)
        block = desk.model.copy_out(*what) if slices is None else None
      if slices is not None:
        self.gathered(slices)
        return
      assert block is not None
    except Exception:
      desk.staging.give(self.num_bytes)
      raise
    desk.reader.expect(
      block,
      lambda started_s, ended_s: self.gathered(split_heads(block)),
      lambda error: self._failed(desk, error),
    )

  def fail(self, error: Exception) -> None:
    """Reports the error."""
    self.failed(error)

  def _failed(self, desk: Desk, error: Exception) -> None:
    desk.staging.give(self.num_bytes)
    self.failed(error)


@dataclass(eq=False)
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
      if desk.model.copy_in_now(*where, self.local):
        self.left()
        self.done()
        return
    marker = desk.model.copy_in(*where, self.block())
    desk.reader.expect(marker, self._ready, self.fail)

  def fail(self, error: Exception) -> None:
    """Reports the error."""
    self.left()
    self.failed(error)

  def _ready(self, started_s: float, ended_s: float) -> None:
    self.left()
    self.done()


Task = PrefillTask | GatherTask | ScatterTask
