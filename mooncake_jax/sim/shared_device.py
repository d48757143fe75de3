# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode instance on the same devices: one step at a time.

A step is one pass over the next chunk, if one waits, and one token of every
row that decodes, if any do (`CostModel.riding_s`): nobody overtakes a
step, so a row's next token waits for the whole chunk. This is chunked prefill
as in Sarathi and vLLM. Steps without a chunk are computed in closed form until
one comes.

Differs from vLLM: a step has a chunk of one request only, of at most
`chunk_tokens` besides the rows, not a budget that several prompts fill; and
the rows' matrix products ride along for nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import WorkId
from mooncake_jax.costs.model import CostModel
from mooncake_jax.request import TokenSegment
from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due
from mooncake_jax.sim.decoding import Decoding
from mooncake_jax.sim.decoding import decoding
from mooncake_jax.sim.stages import SimChunk
from mooncake_jax.sim.works import SimWork


@dataclass(eq=False)
class _Batch:
  """A decode work, as far as it has not emitted.

  Attributes:
    num_left: steps until it ends.
    rows: as they stand now.
  """

  work_id: WorkId
  start_s: float
  rows: DecodeBatch
  num_left: int

  @property
  def context_tokens(self) -> int:
    return sum(row.position + 1 for row in self.rows.rows)

  def emit(self, steps: Decoding) -> Completion:
    """Counts steps that were made; their completion."""
    made = steps.steps.count
    found = steps.completion()
    self.advance(made)
    return replace(found, started_s=self.start_s, done=self.num_left <= 0)

  def advance(self, made: int) -> None:
    """Its rows have emitted so many tokens each."""
    self.num_left -= made
    self.rows = DecodeBatch(
      tuple(
        replace(r, position=r.position + made, remaining=r.remaining - made)
        for r in self.rows.rows
      )
    )


class SharedDevice:
  """The devices of one pair of instances."""

  def __init__(
    self,
    clock: Clock,
    costs: CostModel,
    num_layers: int,
    settled: Callable[[SimWork], None],
    ended: Callable[[SimChunk], None],
    emitted: Callable[[Completion], None],
  ):
    """Starts idle.

    Args:
      costs: what decode steps take; a chunk knows its seconds.
      settled, ended: see `stages.Pipeline`.
      emitted: takes the completions of decode works.
    """
    self._clock = clock
    self.costs = costs
    self._num_layers = num_layers
    self._settled = settled
    self._ended = ended
    self._emitted = emitted
    self._waiting: deque[SimChunk] = deque()
    self._batch: _Batch | None = None
    # The step under way, or the steps without a chunk.
    self._chunk: SimChunk | None = None
    self._steps: Decoding | None = None
    self._due: Due | None = None

  def enter(self, chunk: SimChunk) -> None:
    """Queues a chunk; steps without one end at the next boundary."""
    self._waiting.append(chunk)
    self._cut_short()

  def poke(self) -> None:
    """Something that a chunk follows was settled: `begin` looks."""

  def has_begun(self, chunk: SimChunk) -> bool:
    """Whether its step is under way."""
    return chunk is self._chunk

  def remove(self, chunk: SimChunk) -> None:
    """Takes a chunk out. One that has begun takes its time all the same."""
    if chunk in self._waiting:
      self._waiting.remove(chunk)
    elif chunk is self._chunk:
      self._chunk = None

  def decode(self, work_id: WorkId, batch: DecodeBatch, max_steps: int) -> None:
    """Rows decode from the next step on; see `Backend.decode`."""
    assert self._batch is None, 'one decode work at a time'
    num_left = min(max_steps, min(row.remaining for row in batch.rows))
    self._batch = _Batch(work_id, self._clock.now_s, batch, num_left)

  def cancel(self, work_id: WorkId) -> None:
    """Ends a decode work at the next boundary."""
    if self._batch is not None and self._batch.work_id == work_id:
      self._batch.num_left = 1
      if self._steps is not None:
        self._cut_short()
        self._batch.num_left = self._steps.steps.count

  @property
  def next_token_s(self) -> float | None:
    """When the steps under way give their next token; None without any."""
    return None if self._steps is None else self._steps.next_token_s

  def progress(self, now_s: float) -> Completion | None:
    """See `Decoding.progress`."""
    steps, batch = self._steps, self._batch
    if steps is None or batch is None:
      return None
    before = steps.steps.count
    told = steps.progress(now_s)
    if told is None:
      return None
    batch.advance(before - steps.steps.count)
    return replace(told, started_s=batch.start_s)

  def begin(self) -> None:
    """Starts the next step, once all that happens now has happened."""
    if self._due is not None:
      return
    if self._waiting and self._ready(self._waiting[0]):
      self._mix(self._waiting.popleft())
    elif self._batch is not None:
      batch, now_s = self._batch, self._clock.now_s
      self._steps = decoding(
        batch.work_id, self.costs, batch.rows, batch.num_left, now_s
      )
      self._due = self._clock.at(self._steps.end_s, self._over)

  def _ready(self, chunk: SimChunk) -> bool:
    return chunk.ready_s(0, self._num_layers) <= self._clock.now_s

  def _mix(self, chunk: SimChunk) -> None:
    """One step of a chunk and whatever decodes."""
    batch, now_s = self._batch, self._clock.now_s
    stop_s = now_s + chunk.seconds
    if batch is not None:
      rows, tokens = len(batch.rows.rows), batch.context_tokens
      stop_s += self.costs.riding_s(rows, tokens)
      step = TokenSegment(stop_s, 0.0, 1)
      self._steps = Decoding(batch.work_id, batch.rows, now_s, step)
    self._chunk = chunk
    chunk.pieces = [(0, self._num_layers, stop_s, 0.0)]
    chunk.spans.append((now_s, stop_s))
    self._due = self._clock.at(stop_s, self._over)
    self._settled(chunk)

  def _over(self) -> None:
    """The step ended, or the steps without a chunk."""
    chunk, steps, batch = self._chunk, self._steps, self._batch
    self._chunk = self._steps = self._due = None
    if steps is not None:
      assert batch is not None
      completion = batch.emit(steps)
      if completion.done:
        self._batch = None
      self._emitted(completion)
    if chunk is not None:
      self._ended(chunk)

  def _cut_short(self) -> None:
    """Ends steps without a chunk at the next boundary."""
    steps = self._steps
    if steps is None:
      return
    if steps.cut_short(self._clock.now_s):
      assert self._due is not None
      self._clock.drop(self._due)
      self._due = self._clock.at(steps.end_s, self._over)
