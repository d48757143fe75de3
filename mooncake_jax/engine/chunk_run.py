# SPDX-License-Identifier: Apache-2.0
"""A prefill chunk on its way through the stages, layer group by layer group.

    stage 0 owner: group 0, group 1, ... -> its reader hands x to stage 1
    stage 1 owner:                          group 0, ... -> token

A group starts when what the chunk waits for is done with its layers. Copies of
what it computed are dispatched before the next group: they leave the device
while that computes.
"""

from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
import threading

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Status
from mooncake_jax.backend import WorkId
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.mesh_model import ChunkInputs
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.tasks import Desk


class ChunkRun:
  """One chunk: how far it is on all stages, and how it ends. Any thread.

  It ends once: 'completed' after its last group, else as soon as none of its
  groups is on a device, for until then they write its pages.
  """

  def __init__(
    self,
    work_id: WorkId,
    chunk: PrefillChunk,
    now_s: Callable[[], float],
    computed: Callable[[Layers], None],
    end: Callable[[Completion], None],
    poke: Callable[[], None],
  ):
    """Makes a run that has not begun.

    Args:
      computed: called on an owner's thread when the program that computes a
        layer range was dispatched.
      end: takes the completion.
      poke: makes the owners look again: it is over.
    """
    self.work_id = work_id
    self.chunk = chunk
    self.computed = computed
    self._now_s = now_s
    self._end = end
    self._poke = poke
    self._lock = threading.Lock()
    self._num_flying = 0
    self._why: tuple[Status, str] | None = None
    self._token: int | None = None
    self._is_ended = False
    self._spans: list[tuple[float, float]] = []

  @property
  def is_stopped(self) -> bool:
    """Whether nothing of it is to be dispatched any more."""
    return self._why is not None

  def begin(self) -> bool:
    """Counts a group that is about to be dispatched; False once stopped."""
    with self._lock:
      if self._why is not None:
        return False
      self._num_flying += 1
      return True

  def landed(self) -> None:
    """A group has left the device."""
    with self._lock:
      self._num_flying -= 1
    self._end_if_over()

  def left_stage(self, started_s: float, ended_s: float) -> None:
    """A stage is through with it."""
    self._spans.append((started_s, ended_s))

  def complete(self, token: int | None) -> None:
    """Its last group was computed."""
    self._token = token
    self.stop('completed', '')

  def stop(self, status: Status, error: str) -> None:
    """Ends it early, unless something else did."""
    with self._lock:
      self._why = self._why or (status, error)
    self._poke()
    self._end_if_over()

  def cancel(self) -> None:
    """Makes it end as 'cancelled' unless its last group was computed."""
    self.stop('cancelled', 'cancelled')

  def _end_if_over(self) -> None:
    with self._lock:
      if self._why is None or self._num_flying or self._is_ended:
        return
      self._is_ended = True
    now_s = self._now_s()
    spans = tuple(self._spans)
    self._end(
      Completion(
        self.work_id,
        self._why[0],
        spans[0][0] if spans else now_s,
        spans[-1][1] if spans else now_s,
        self._why[1],
        token=self._token,
        spans=spans,
      )
    )


class StageRun:
  """A chunk on one stage. Its owner's thread, but for `grant`."""

  def __init__(
    self,
    run: ChunkRun,
    desk: Desk,
    poke: Callable[[], None],
    hand_on: Callable[[jax.Array], None] | None,
  ):
    """Makes a run of all the stage's groups, none of which is granted.

    Args:
      poke: makes the owner look again whether a group may start.
      hand_on: takes what the next stage needs; None on the last one.
    """
    self.run = run
    self._desk = desk
    self._poke = poke
    self._hand_on = hand_on
    self._inputs: ChunkInputs | None = None
    self._x: jax.Array | None = None
    self._granted = [False] * len(desk.model.groups)
    self._next = 0
    self._started_s: float | None = None

  @property
  def groups(self) -> Sequence[Layers]:
    return self._desk.model.groups

  @property
  def writes(self) -> set[int]:
    """The pages it writes."""
    chunk, page_tokens = self.run.chunk, self._desk.model.page_tokens
    first, last = chunk.start // page_tokens, -(-chunk.stop // page_tokens)
    return set(chunk.pages[first:last])

  @property
  def is_open(self) -> bool:
    """Whether there is more to dispatch."""
    return self._next < len(self._granted) and not self.run.is_stopped

  def grant(self, group: int, error: str) -> None:
    """What it waits for is done with a group's layers, or failed."""
    if error:
      self.run.stop('failed', error)
    self._granted[group] = True
    self._poke()

  def advance(self) -> bool:
    """Dispatches the next group if it may start now."""
    slots = self._desk.group_slots
    if not self._granted[self._next] or not slots.acquire(blocking=False):
      return False
    if not self.run.begin():
      slots.release()
      return False
    since_s = self._desk.reader.now_s()
    try:
      with TraceAnnotation('mooncake.prefill'):
        out = self._dispatch()
    except Exception as error:
      slots.release()
      self.run.stop('failed', describe(error))
      self.run.landed()
      return False
    group, self._next = self._next, self._next + 1
    self.run.computed(self.groups[group])
    self._desk.reader.expect(
      out, partial(self._ready, group, out), self._failed, since_s
    )
    return True

  def _dispatch(self) -> jax.Array:
    model = self._desk.model
    model.check_pool()
    if self._inputs is None:
      self._inputs = model.chunk_inputs(self.run.chunk)
    self._x = model.prefill(self._inputs, self._next, self._x)
    if self._next == len(self.groups) - 1 and self._hand_on is None:
      self._x.copy_to_host_async()
    return self._x

  def _ready(
    self, group: int, out: jax.Array, started_s: float, ended_s: float
  ) -> None:
    """On the reader's thread: a group was computed."""
    self._free_slot()
    if self._started_s is None:
      self._started_s = started_s
    if group == len(self.groups) - 1:
      self.run.left_stage(self._started_s, ended_s)
      if self._hand_on is not None:
        self._hand_on(out)
      else:
        token = int(np.asarray(out)) if self.run.chunk.sampling else None
        self.run.complete(token)
    self.run.landed()

  def _failed(self, error: Exception) -> None:
    self._free_slot()
    self.run.stop('failed', describe(error))
    self.run.landed()

  def _free_slot(self) -> None:
    self._desk.group_slots.release()
    self._poke()
