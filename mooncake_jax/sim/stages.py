# SPDX-License-Identifier: Apache-2.0
"""A prefill instance's stages: chunks pass through them in the order given.

A chunk enters a stage once the stage before has handed it over, the chunk
before has left, and the first layer of what it follows is there. Its layers
take equally long; one whose prefix comes later than that waits for it.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

from mooncake_jax.backend import WorkId
from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due
from mooncake_jax.sim.works import SimWork
from mooncake_jax.sim.works import UNKNOWN_S


class SimChunk(SimWork):
  """A chunk that takes `seconds` on all layers.

  Attributes:
    instance: that computes it.
    pieces: layers computed in one go, (first, stop, start_s, seconds), each
      layer taking its share; as far as it is settled when.
    spans: [start_s, stop_s) on the stages so far; the last may not know its
      stop yet.
  """

  __slots__ = ('instance', 'num_layers', 'pieces', 'seconds', 'spans')

  def __init__(
    self, work_id: WorkId, seconds: float, instance: str, num_layers: int
  ):
    super().__init__(work_id)
    self.seconds = seconds
    self.instance = instance
    self.num_layers = num_layers
    self.pieces: list[tuple[int, int, float, float]] = []
    self.spans: list[tuple[float, float]] = []

  def range_s(self, start_layer: int, stop_layer: int) -> float:
    for first, stop, start_s, seconds in self.pieces:
      if first < stop_layer <= stop:  # layers are done in order
        return start_s + seconds * ((stop_layer - first) / (stop - first))
    return UNKNOWN_S

  def layers_s(self) -> Sequence[float]:
    return [self.range_s(i, i + 1) for i in range(self.num_layers)]


@dataclass(eq=False, slots=True)
class _Stage:
  """Layers [first, stop).

  Attributes:
    reached, done_s: of the chunk that it runs, the first layer of which is
      not settled when it is computed, and when those before it are.
  """

  first: int
  stop: int
  waiting: deque[SimChunk] = field(default_factory=deque)
  running: SimChunk | None = None
  due: Due | None = None
  free_s: float = 0.0
  reached: int = 0
  done_s: float = 0.0


class Pipeline:
  """The stages of one instance."""

  def __init__(
    self,
    clock: Clock,
    stage_layers: Sequence[int],
    boundary_s: float,
    settled: Callable[[SimWork], None],
    ended: Callable[[SimChunk], None],
  ):
    """Starts empty.

    Args:
      stage_layers: layers of each stage.
      boundary_s: until the next stage has what one computed.
      settled: called when it is known when a chunk's layers will be done.
      ended: called when a chunk left the last stage.
    """
    self._clock = clock
    self._boundary_s = boundary_s
    self._settled = settled
    self._ended = ended
    stops = [sum(stage_layers[: i + 1]) for i in range(len(stage_layers))]
    self._num_layers = stops[-1]
    self._stages = [_Stage(a, b) for a, b in zip((0, *stops), stops)]

  def enter(self, chunk: SimChunk) -> None:
    """Queues a chunk at the first stage."""
    self._stages[0].waiting.append(chunk)
    self._advance(0)

  def poke(self) -> None:
    """Something that a chunk follows was settled."""
    for i in range(len(self._stages)):
      self._advance(i)

  def remove(self, chunk: SimChunk) -> None:
    """Takes a chunk out wherever it is; who is behind it goes on."""
    chunk.pieces = []
    for i, stage in enumerate(self._stages):
      if chunk in stage.waiting:
        stage.waiting.remove(chunk)
        self._advance(i)
      elif stage.running is chunk:
        if stage.due is not None:
          self._clock.drop(stage.due)
        self._leave(stage)
        self._advance(i)

  def has_begun(self, chunk: SimChunk) -> bool:
    """Whether a layer of it was computed, or begun."""
    return bool(chunk.spans) and chunk.spans[0][0] < self._clock.now_s

  def _advance(self, i: int) -> None:
    """Computes as far as it is known when that can be."""
    stage = self._stages[i]
    if stage.running is None and stage.waiting:
      chunk = stage.waiting[0]
      ready_s = chunk.ready_s(stage.first, stage.first + 1)
      if ready_s != UNKNOWN_S:
        self._start(stage, stage.waiting.popleft(), ready_s)
    chunk = stage.running
    if chunk is None or stage.due is not None:
      return
    has_come = self._compute(chunk, stage)
    if stage.reached == stage.stop:
      chunk.spans[-1] = chunk.spans[-1][0], stage.done_s
      stage.due = self._clock.at(stage.done_s, self._left, i)
    if has_come:
      self._settled(chunk)

  def _start(self, stage: _Stage, chunk: SimChunk, ready_s: float) -> None:
    """A chunk enters a stage; not before its first layer is `ready_s`."""
    handed_s = chunk.spans[-1][1] + self._boundary_s if chunk.spans else 0.0
    start_s = max(self._clock.now_s, stage.free_s, handed_s, ready_s)
    stage.running = chunk
    stage.reached, stage.done_s = stage.first, start_s
    chunk.spans.append((start_s, UNKNOWN_S))

  def _compute(self, chunk: SimChunk, stage: _Stage) -> bool:
    """Settles when more layers of the chunk are done; whether any were."""
    before = stage.reached
    if chunk.ready_s(before, stage.stop) <= stage.done_s:
      self._piece(chunk, stage, stage.stop)
      return True
    for need_s in chunk.needs_s(before, stage.stop):
      if need_s == UNKNOWN_S:
        break
      stage.done_s = max(stage.done_s, need_s)
      self._piece(chunk, stage, stage.reached + 1)
    return stage.reached > before

  def _piece(self, chunk: SimChunk, stage: _Stage, stop: int) -> None:
    """Layers up to `stop` are computed without a wait."""
    first, start_s = stage.reached, stage.done_s
    seconds = chunk.seconds * ((stop - first) / self._num_layers)
    chunk.pieces.append((first, stop, start_s, seconds))
    stage.reached, stage.done_s = stop, start_s + seconds

  def _leave(self, stage: _Stage) -> None:
    stage.running = stage.due = None
    stage.free_s = self._clock.now_s

  def _left(self, i: int) -> None:
    """The stage's chunk goes on to the next stage, or is computed."""
    stage = self._stages[i]
    chunk = stage.running
    assert chunk is not None
    self._leave(stage)
    if i + 1 < len(self._stages):
      self._stages[i + 1].waiting.append(chunk)
      self._advance(i + 1)
    else:
      self._ended(chunk)
    self._advance(i)
