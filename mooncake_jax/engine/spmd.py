# SPDX-License-Identifier: Apache-2.0
"""SPMD: one owner thread, one program a tick in which every stage advances.

    tick 1: chunk 0 | -       | -
    tick 2: chunk 1 | chunk 0 | -
    tick 3: chunk 2 | chunk 1 | chunk 0 -> token

Chunks of different requests follow each other; nothing is drained between.
A chunk leaves a stage when all stages are through: the slowest sets the pace.
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
from mooncake_jax.engine.reader import Reader
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.stage_pool import ChunkInputs
from mooncake_jax.engine.tasks import MAX_GROUPS
from mooncake_jax.engine.tick_model import TickModel


def start(run: ChunkRun, stages: Sequence[Stage], when: When) -> None:
  """Gives a chunk to the pipe that all stages share; see `mpmd.start`."""
  owner = stages[0].owner
  ticked = TickRun(run, stages, owner.poke)
  owner.post_chunk(ticked)
  for i, stage in enumerate(stages):
    when(stage.layers, partial(ticked.grant, i))


class TickRun:
  """A chunk in the pipe. The owner's thread, but for `grant`.

  Attributes:
    at: the stage that it enters next.
    granted: for each stage, what it waits for is done with its layers.
  """

  def __init__(
    self, run: ChunkRun, stages: Sequence[Stage], poke: Callable[[], None]
  ):
    self.run = run
    self.at = 0
    self.granted = [False] * len(stages)
    self._pool = stages[0].desk.pool
    self._poke = poke
    self._inputs: ChunkInputs | None = None

  @property
  def writes(self) -> set[int]:
    """The pages it writes."""
    return self._pool.written_pages(self.run.chunk)

  @property
  def is_open(self) -> bool:
    """Whether there is more to dispatch."""
    return self.at < len(self.granted) and not self.run.is_stopped

  @property
  def inputs(self) -> ChunkInputs:
    """What programs take, on the host; raises ValueError."""
    if self._inputs is None:
      self._inputs = self._pool.chunk_inputs(self.run.chunk)
    return self._inputs

  def grant(self, stage: int, error: str) -> None:
    """What it waits for is done with a stage's layers, or failed."""
    if error:
      self.run.stop('failed', error)
    self.granted[stage] = True
    self._poke()


class TickPipe:
  """Chunks that wait and the chunk of each stage. The owner's thread."""

  def __init__(self, model: TickModel, reader: Reader):
    self.stages: Sequence[Stage] = ()  # given once there are any
    self._model = model
    self._reader = reader
    self._waiting: deque[TickRun] = deque()
    self._slots: list[TickRun | None] = []
    self._num_dispatched = 0  # ticks, by the owner
    self._num_ended = 0  # by whoever reads, one after the other

  @property
  def runs(self) -> list[TickRun]:
    return [*filter(None, self._slots), *self._waiting]

  def add(self, run: TickRun) -> None:
    """Puts a chunk behind the others."""
    self._waiting.append(run)

  def advance(self) -> bool:
    """Dispatches a tick if all its chunks may enter their next stages."""
    self._sweep()
    runs = [self._next_run(), *self._slots[: len(self.stages) - 1]]
    runs += [None] * (len(self.stages) - len(runs))
    may_enter = all(run is None or run.granted[run.at] for run in runs)
    if not any(runs) or not may_enter or not self._has_room(runs[0]):
      return False
    if runs[0] is not None:
      self._waiting.popleft()
    self._slots = runs
    self._tick([run if run and run.run.begin() else None for run in runs])
    return True

  def _sweep(self) -> None:
    """Forgets chunks that were stopped."""
    if any(not run.is_open for run in self._waiting):
      self._waiting = deque(run for run in self._waiting if run.is_open)
    self._slots = [run if run and run.is_open else None for run in self._slots]

  def _next_run(self) -> TickRun | None:
    """The chunk to enter the first stage; one that can't be computed fails."""
    while self._waiting and self._waiting[0].granted[0]:
      run = self._waiting[0]
      try:
        _ = run.inputs
        return run
      except ValueError as error:
        run.run.stop('failed', describe(error))
        self._waiting.popleft()
    return None

  def _has_room(self, entering: TickRun | None) -> bool:
    """Whether another tick may be dispatched now.

    One that leaves the first stage empty waits until no tick runs: a chunk
    may come.
    """
    num_flying = self._num_dispatched - self._num_ended
    return num_flying < (1 if entering is None else MAX_GROUPS)

  def _tick(self, runs: Sequence[TickRun | None]) -> None:
    live = [run for run in runs if run]
    since_s = self._reader.now_s()
    last = runs[-1]
    try:
      with TraceAnnotation('mooncake.prefill'):
        for stage in self.stages:
          stage.desk.pool.check()
        x_Z1TD = self._model.tick([run.inputs if run else None for run in runs])
        draws = last is not None and last.run.chunk.sampling is not None
        drawn = self._model.draw(last.inputs) if last and draws else None
    except Exception as error:
      for run in live:
        run.run.stop('failed', describe(error))
        run.run.landed()
      return
    self._num_dispatched += 1
    for run, stage in zip(runs, self.stages):
      if run:
        run.at += 1
        run.run.computed(stage.layers)
    ready = partial(self._ready, live, last if drawn is None else None)
    self._reader.expect(x_Z1TD, ready, partial(self._failed, live), since_s)
    if last and drawn is not None and last.run.begin():
      done = partial(self._drawn, last, drawn)
      self._reader.expect(drawn, done, partial(self._lost, last))

  def _ready(
    self,
    runs: Sequence[TickRun],
    last: TickRun | None,
    started_s: float,
    ended_s: float,
  ) -> None:
    """On the reader's thread: a tick has ended."""
    self._num_ended += 1
    self.stages[0].owner.poke()
    for run in runs:
      run.run.left_stage(started_s, ended_s)
    if last:
      last.run.complete(None)
    for run in runs:
      run.run.landed()

  def _failed(self, runs: Sequence[TickRun], error: Exception) -> None:
    self._num_ended += 1
    self.stages[0].owner.poke()
    for run in runs:
      self._lost(run, error)

  def _drawn(
    self, run: TickRun, report_R: jax.Array, started_s: float, ended_s: float
  ) -> None:
    run.run.complete(np.asarray(report_R))
    run.run.landed()

  def _lost(self, run: TickRun, error: Exception) -> None:
    run.run.stop('failed', describe(error))
    run.run.landed()
