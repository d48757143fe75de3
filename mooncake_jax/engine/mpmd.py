# SPDX-License-Identifier: Apache-2.0
"""MPMD: every stage runs programs of its own, on an owner thread of its own.

    stage 0 owner: group 0, group 1, ... -> its reader hands x to stage 1
    stage 1 owner:                          group 0, ... -> token

A chunk enters a stage when the chunk before has left it and the stage before
has computed it: activations are moved by `device_put` once they are there, so
a stage's devices never hold a program that waits for another's. Chunks of
different requests follow each other without a gap. A layer group starts when
what the chunk waits for is done with its layers.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence
from functools import partial

import jax
from jax.profiler import TraceAnnotation
import numpy as np

from mooncake_jax.engine.chunk_run import ChunkRun
from mooncake_jax.engine.chunk_run import When
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.stage_pool import ChunkInputs


def start(run: ChunkRun, stages: Sequence[Stage], when: When) -> None:
  """Gives a chunk to all stages; each waits for the one before.

  Args:
    when: calls back once what the chunk waits for is done with a layer range,
      or with an error.
  """
  hand_on = None
  for stage in reversed(stages):
    on_stage = StageRun(run, stage, hand_on, is_fed=stage is stages[0])
    stage.owner.post_chunk(on_stage)
    for i, layers in enumerate(on_stage.groups):
      when(layers, partial(on_stage.grant, i))
    hand_on = on_stage.feed


class StageRun:
  """A chunk on one stage. Its owner's thread, but for `grant` and `feed`."""

  def __init__(
    self,
    run: ChunkRun,
    stage: Stage,
    hand_on: Callable[[jax.Array], None] | None,
    is_fed: bool,
  ):
    """Makes a run of all the stage's groups, none of which is granted.

    Args:
      hand_on: takes what the next stage needs; None on the last one.
      is_fed: nothing comes from a stage before.
    """
    self.run = run
    assert stage.desk.model is not None
    self._desk, self._model = stage.desk, stage.desk.model
    self._poke = stage.owner.poke
    self._hand_on = hand_on
    self._is_fed = is_fed
    self._inputs: ChunkInputs | None = None
    self._x: jax.Array | None = None
    self._granted = [False] * len(self.groups)
    self._next = 0
    self._started_s: float | None = None

  @property
  def groups(self) -> Sequence[Layers]:
    return self._model.groups

  @property
  def writes(self) -> set[int]:
    """The pages it writes."""
    return self._desk.pool.written_pages(self.run.chunk)

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

  def feed(self, x: jax.Array) -> None:
    """The stage before has computed it. That stage's reader's thread."""
    self._x = self._desk.pool.take(x)
    self._is_fed = True
    self._poke()

  def advance(self) -> bool:
    """Dispatches the next group if it may start now."""
    slots = self._desk.group_slots
    if not self._prepare() or not slots.acquire(blocking=False):
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

  def _prepare(self) -> bool:
    """Puts inputs on the devices ahead; whether the next group may start."""
    try:
      if self._inputs is None:
        pool = self._desk.pool
        self._inputs = pool.put(pool.chunk_inputs(self.run.chunk))
    except Exception as error:
      self.run.stop('failed', describe(error))
      return False
    return self._is_fed and self._granted[self._next]

  def _dispatch(self) -> jax.Array:
    assert self._inputs is not None
    self._desk.pool.check()
    self._x = self._model.prefill(self._inputs, self._next, self._x)
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
        draws = self.run.chunk.sampling is not None
        self.run.complete(np.asarray(out) if draws else None)
    self.run.landed()

  def _failed(self, error: Exception) -> None:
    self._free_slot()
    self.run.stop('failed', describe(error))
    self.run.landed()

  def _free_slot(self) -> None:
    self._desk.group_slots.release()
    self._poke()


class StagePipe:
  """The chunks of one stage that are not dispatched. Its owner's thread."""

  def __init__(self):
    self._runs: deque[StageRun] = deque()

  @property
  def runs(self) -> Sequence[StageRun]:
    return self._runs

  def add(self, run: StageRun) -> None:
    """Puts a chunk behind the others."""
    self._runs.append(run)

  def advance(self) -> bool:
    """Dispatches the next layer group if it may start now."""
    if any(not run.is_open for run in self._runs):
      self._runs = deque(run for run in self._runs if run.is_open)
    return bool(self._runs) and self._runs[0].advance()
