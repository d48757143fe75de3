# SPDX-License-Identifier: Apache-2.0
"""How long chunks take through the stages of a pipeline.

Chunk c enters stage s as soon as chunk c - 1 left it and stage s - 1 handed c
over (chunked pipeline parallelism, FAST'25 section 3.3). A stage has a share of
the layers and takes that share of a chunk's seconds.

n chunks of t seconds on s even stages take (n + s - 1) * t / s: small chunks
leave small bubbles at both ends, until what every chunk costs whatever its
size outweighs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import itertools
from typing import NamedTuple

from mooncake_jax.costs.chunks import chunk_seconds
from mooncake_jax.costs.chunks import chunk_stops
from mooncake_jax.costs.chunks import Chunking
from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import CostModel


class StageSpan(NamedTuple):
  """Chunk `chunk` is computed on stage `stage` in [start_s, stop_s)."""

  chunk: int
  stage: int
  start_s: float
  stop_s: float


@dataclass(frozen=True)
class PipelineSplit:
  """What a makespan consists of.

  Attributes:
    compute_s: the work, spread evenly over the stages.
    bubble_s: stages that wait for chunks or for each other.
    boundary_s: handing activations from stage to stage.
  """

  compute_s: float
  bubble_s: float
  boundary_s: float

  @property
  def makespan_s(self) -> float:
    return self.compute_s + self.bubble_s + self.boundary_s


def stage_shares(
  num_layers: int, stages: int, stage_layers: Sequence[int] = ()
) -> tuple[int, ...]:
  """Layers of each stage.

  Args:
    stage_layers: what was asked for; () is as even as possible, the larger
      stages first (the last one has the unembedding besides).

  Raises:
    ValueError: more stages than layers, or layers that do not add up.
  """
  check_count('stages', stages)
  if not stage_layers:
    if stages > num_layers:
      raise ValueError(f'{stages=} must be at most {num_layers=}')
    least, larger = divmod(num_layers, stages)
    return (least + 1,) * larger + (least,) * (stages - larger)
  for i, layers in enumerate(stage_layers):
    check_count(f'stage_layers[{i}]', layers)
  if len(stage_layers) != stages or sum(stage_layers) != num_layers:
    raise ValueError(
      f'stage_layers={tuple(stage_layers)} must be {stages=} numbers that add '
      f'up to {num_layers=}'
    )
  return tuple(stage_layers)


def stage_spans(
  chunk_seconds: Sequence[float],
  stage_layers: Sequence[int],
  boundary_s: float | Sequence[float] = 0.0,
) -> list[StageSpan]:
  """When each chunk is on each stage, chunk by chunk.

  Args:
    chunk_seconds: of each chunk on all layers.
    stage_layers: layers of each stage.
    boundary_s: until the next stage has a chunk's activations; one number,
      or one for each chunk.
  """
  total = sum(stage_layers)
  free_s = [0.0] * len(stage_layers)
  spans: list[StageSpan] = []
  for c, seconds in enumerate(chunk_seconds):
    hand_s = (
      boundary_s if isinstance(boundary_s, float | int) else boundary_s[c]
    )
    ready_s = 0.0
    for s, layers in enumerate(stage_layers):
      start_s = max(free_s[s], ready_s)
      free_s[s] = start_s + seconds * layers / total
      ready_s = free_s[s] + hand_s
      spans.append(StageSpan(c, s, start_s, free_s[s]))
  return spans


def makespan_s(
  chunk_seconds: Sequence[float],
  stage_layers: Sequence[int],
  boundary_s: float | Sequence[float] = 0.0,
) -> float:
  """From the start of the first chunk to the end of the last; see spans."""
  spans = stage_spans(chunk_seconds, stage_layers, boundary_s)
  return spans[-1].stop_s if spans else 0.0


def even_makespan_s(
  num_chunks: int, stages: int, chunk_s: float, boundary_s: float = 0.0
) -> float:
  """`makespan_s` of equal chunks on equal stages, in closed form.

  (n + s - 1) * t / s + (s - 1) * boundary, t on all layers. Nothing takes 0 s.
  """
  if not num_chunks:
    return 0.0
  waves = num_chunks + stages - 1
  return waves * chunk_s / stages + (stages - 1) * boundary_s


def even_bubble_share(num_chunks: int, stages: int) -> float:
  """Share of the stages' time that `even_makespan_s` leaves idle."""
  return (stages - 1) / max(num_chunks + stages - 1, 1)


def split(spans: Sequence[StageSpan]) -> PipelineSplit:
  """What the makespan of these spans, planned or measured, consists of.

  On an idle pipeline the first chunk finds every stage idle, so what lies
  between its stages is handing over; all else that is not work is bubbles.
  Under load it may have waited there for other requests' chunks: then that is
  counted as handing over too, and `boundary_s` is the most that it can be.
  """
  if not spans:
    return PipelineSplit(0.0, 0.0, 0.0)
  begin_s = min(span.start_s for span in spans)
  makespan_s = max(span.stop_s for span in spans) - begin_s
  stages = 1 + max(span.stage for span in spans)
  compute_s = sum(span.stop_s - span.start_s for span in spans) / stages
  first = sorted(s for s in spans if s.chunk == 0)
  boundary_s = sum(b.start_s - a.stop_s for a, b in itertools.pairwise(first))
  bubble_s = makespan_s - compute_s - boundary_s
  return PipelineSplit(compute_s, bubble_s, boundary_s)


def pipelined_prompt_s(
  costs: CostModel,
  num_tokens: int,
  prefix_tokens: int,
  chunk_tokens: int,
  stage_layers: Sequence[int],
  *,
  chunking: Chunking = 'fixed',
  quantum: int = 1,
  boundary_s: float = 0.0,
) -> float:
  """`CostModel.prompt_s` on the stages of a pipeline."""
  if len(stage_layers) == 1 and chunking == 'fixed':
    return costs.prompt_s(num_tokens, prefix_tokens, chunk_tokens)
  stops = chunk_stops(
    costs, num_tokens, prefix_tokens, chunk_tokens, chunking, quantum
  )
  seconds = chunk_seconds(costs, prefix_tokens, stops)
  return makespan_s(seconds, stage_layers, boundary_s)


def best_chunk_tokens(
  costs: CostModel,
  num_tokens: int,
  prefix_tokens: int,
  stage_layers: Sequence[int],
  sizes: Sequence[int],
  *,
  chunking: Chunking = 'fixed',
  quantum: int = 1,
  boundary_s: float = 0.0,
) -> int:
  """The size with the least `pipelined_prompt_s`; of equals the largest.

  Raises:
    ValueError: no sizes to choose from.
  """
  if not sizes:
    raise ValueError(f'sizes={tuple(sizes)} must not be empty')

  def seconds(size: int) -> float:
    return pipelined_prompt_s(
      costs,
      num_tokens,
      prefix_tokens,
      size,
      stage_layers,
      chunking=chunking,
      quantum=quantum,
      boundary_s=boundary_s,
    )

  return min(sizes, key=lambda size: (seconds(size), -size))
