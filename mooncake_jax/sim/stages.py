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

from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due
from mooncake_jax.sim.works import SimWork
from mooncake_jax.sim.works import UNKNOWN_S


@dataclass(eq=False)
class SimChunk(SimWork):
  """A chunk that takes `seconds` on all layers.

  Attributes:
    instance: that computes it.
    done_s: when each layer is computed; grows stage by stage.
    spans: [start_s, stop_s) on the stages so far.
  """

  seconds: float = 0.0
  instance: str = ''
  done_s: list[float] = field(default_factory=list)
  spans: list[tuple[float, float]] = field(default_factory=list)

  def layers_s(self) -> Sequence[float]:
    return self.done_s

  def range_s(self, start_layer: int, stop_layer: int) -> float:
    return self.done_s[stop_layer - 1]  # they are done in order


@dataclass(eq=False)
class _Stage:
  first: int
  stop: int
  waiting: deque[SimChunk] = field(default_factory=deque)
  running: SimChunk | None = None
  due: Due | None = None
  free_s: float = 0.0


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
    chunk.done_s = [UNKNOWN_S] * self._num_layers
    self._stages[0].waiting.append(chunk)
    self._advance(0)

  def poke(self) -> None:
    """Something that a chunk follows was settled."""
    for i in range(len(self._stages)):
      self._advance(i)

  def remove(self, chunk: SimChunk) -> None:
    """Takes a chunk out wherever it is; who is behind it goes on."""
    chunk.done_s = [UNKNOWN_S] * self._num_layers
    for i, stage in enumerate(self._stages):
      if chunk in stage.waiting:
        stage.waiting.remove(chunk)
        self._advance(i)
      elif stage.running is chunk:
        assert stage.due is not None
        self._clock.drop(stage.due)
        stage.running, stage.free_s = None, self._clock.now_s
        self._advance(i)

  def has_begun(self, chunk: SimChunk) -> bool:
    """Whether a layer of it was computed, or begun."""
    return bool(chunk.spans) and chunk.spans[0][0] < self._clock.now_s

  def _advance(self, i: int) -> None:
    """Lets the first in the queue enter, if it is known when it can."""
    stage = self._stages[i]
    if stage.running is not None or not stage.waiting:
      return
    chunk = stage.waiting[0]
    ready_s = chunk.ready_s(stage.first, stage.stop)
    if ready_s == UNKNOWN_S:
      return
    stage.running = stage.waiting.popleft()
    handed_s = chunk.spans[-1][1] + self._boundary_s if chunk.spans else 0.0
    start_s = max(self._clock.now_s, stage.free_s, handed_s)
    if ready_s <= start_s:
      self._compute(chunk, stage, start_s)
    else:
      start_s = max(start_s, chunk.ready_s(stage.first, stage.first + 1))
      self._compute_as_ready(chunk, stage, start_s)
    stop_s = chunk.done_s[stage.stop - 1]
    chunk.spans.append((start_s, stop_s))
    stage.due = self._clock.at(stop_s, self._left, i)
    self._settled(chunk)

  def _compute(self, chunk: SimChunk, stage: _Stage, start_s: float) -> None:
    """Settles when the stage's layers of the chunk are done."""
    n = stage.stop - stage.first
    share_s = chunk.seconds * (n / self._num_layers)
    chunk.done_s[stage.first : stage.stop] = [
      start_s + share_s * (layer / n) for layer in range(1, n + 1)
    ]

  def _compute_as_ready(
    self, chunk: SimChunk, stage: _Stage, start_s: float
  ) -> None:
    """The same, where a layer has to wait for what the chunk follows."""
    layer_s = chunk.seconds / self._num_layers
    done_s = start_s
    for layer, need_s in enumerate(
      chunk.needs_s(stage.first, stage.stop), stage.first
    ):
      done_s = max(done_s, need_s) + layer_s
      chunk.done_s[layer] = done_s

  def _left(self, i: int) -> None:
    """The stage's chunk goes on to the next stage, or is computed."""
    stage = self._stages[i]
    chunk = stage.running
    assert chunk is not None
    stage.running, stage.free_s = None, self._clock.now_s
    if i + 1 < len(self._stages):
      self._stages[i + 1].waiting.append(chunk)
      self._advance(i + 1)
    else:
      self._ended(chunk)
    self._advance(i)
