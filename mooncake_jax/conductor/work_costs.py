# SPDX-License-Identifier: Apache-2.0
"""What one instance is believed to be, and what its work is believed to take.

Instances may differ (speed, memory, tensor parallelism, stages): each has its
own `InstanceBelief`, and those with equal ones share one `WorkCosts`.
"""

from dataclasses import dataclass
import math

from mooncake_jax.cluster_spec import Chunking
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.pipeline import best_chunk_tokens
from mooncake_jax.costs.pipeline import pipelined_prompt_s
from mooncake_jax.model_config import ModelConfig

# Links a prefix may cross on its way to a prefill instance.
PREFIX_LINKS: tuple[Link, ...] = ('onload', 'ssd_read', 'copy', 'remote_read')


@dataclass(frozen=True)
class InstanceBelief:
  """One instance as the Conductor counts on it.

  Attributes:
    costs: seconds of its work.
    chunk_tokens: prompt tokens it prefills at once.
    decode_pool_tokens: KVCache its devices hold where it decodes.
    max_batch: rows of its decode batch.
    stage_layers: layers of each of its stages; one stage is no pipeline.
    chunking: 'fixed' chunks; 'dynamic' or 'auto' ones of `chunk_sizes`.
    chunk_sizes: in rising order; () is `chunk_tokens` alone.
  """

  costs: CostModel
  chunk_tokens: int
  decode_pool_tokens: int
  max_batch: int
  stage_layers: tuple[int, ...] = (1,)
  chunking: Chunking = 'fixed'
  chunk_sizes: tuple[int, ...] = ()

  def __post_init__(self):
    for name in ('chunk_tokens', 'decode_pool_tokens', 'max_batch'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'InstanceBelief.{name}={getattr(self, name)!r} must be >= 1'
        )
    if not self.stage_layers or min(self.stage_layers) < 1:
      raise ValueError(
        f'InstanceBelief.stage_layers={self.stage_layers} must be numbers >= 1'
      )


def belief_of(
  cluster: ClusterSpec, model: ModelConfig, costs: CostModel
) -> InstanceBelief:
  """An instance of a cluster whose instances are alike."""
  return InstanceBelief(
    costs,
    cluster.chunk_tokens,
    (cluster.decode_pages - 1) * cluster.page_tokens,
    cluster.max_batch,
    cluster.layers_of_stages(model),
    cluster.chunking,
    cluster.chunk_buckets,
  )


@dataclass(frozen=True)
class Line:
  """Seconds of moving blocks over an idle link, latency_s + n * block_s."""

  latency_s: float
  block_s: float


class WorkCosts:
  """Seconds of an instance's work, in blocks and steps."""

  def __init__(
    self, belief: InstanceBelief, block_bytes: int, block_size_tokens: int
  ):
    self.belief = belief
    self._costs = belief.costs
    self._bottleneck = max(belief.stage_layers) / sum(belief.stage_layers)
    self.links = {
      link: _line(belief.costs, link, block_bytes) for link in PREFIX_LINKS
    }
    self.step = StepCosts(belief.costs)
    # The first block of a prefix saves least: later ones attend to more.
    size = block_size_tokens
    computed_s = belief.costs.prefill_s(2 * size, 0)
    saved_s = computed_s - belief.costs.prefill_s(size, size)
    self.block_s = self._bottleneck * saved_s

  def prompt_s(self, num_tokens: int, prefix_tokens: int) -> float:
    """From the start of the first chunk to the end of the last."""
    belief, size = self.belief, self.belief.chunk_tokens
    stages, sizes = belief.stage_layers, belief.chunk_sizes or (size,)
    if belief.chunking == 'auto':
      size = best_chunk_tokens(
        self._costs, num_tokens, prefix_tokens, stages, sizes
      )
    if belief.chunking != 'dynamic':
      return pipelined_prompt_s(
        self._costs, num_tokens, prefix_tokens, size, stages
      )
    return pipelined_prompt_s(
      self._costs,
      num_tokens,
      prefix_tokens,
      size,
      stages,
      chunking='dynamic',
      quantum=sizes[0],
    )

  def busy_s(
    self, num_tokens: int, prefix_tokens: int, prompt_s: float
  ) -> float:
    """How long the next prompt waits for this one: its bottleneck stage's."""
    if len(self.belief.stage_layers) == 1:
      return prompt_s
    return self._bottleneck * self._costs.prompt_s(
      num_tokens, prefix_tokens, self.belief.chunk_tokens
    )


class StepCosts:
  """A decode step's seconds as base + rows + context, to rank batches by.

  The slopes are the cost model's between an empty and a large batch; `exact`
  asks the model itself.
  """

  ROWS = 64
  CONTEXT_TOKENS = 1 << 18

  def __init__(self, costs: CostModel):
    self.exact = costs.decode_step_s
    base_s = costs.decode_step_s(1, 0)
    full_s = costs.decode_step_s(1, self.CONTEXT_TOKENS)
    many_s = costs.decode_step_s(self.ROWS, self.CONTEXT_TOKENS)
    self.per_context_token_s = (full_s - base_s) / self.CONTEXT_TOKENS
    self.per_row_s = (many_s - full_s) / (self.ROWS - 1)
    self.base_s = base_s - self.per_row_s


def _line(costs: CostModel, link: Link, block_bytes: int) -> Line:
  """A link's line from two points of the cost model, far apart."""
  latency_s = costs.transfer_s(0, link)
  many = 1 << 10
  seconds = costs.transfer_s(many * block_bytes, link)
  assert math.isfinite(seconds), f'{link=} takes {seconds} s'
  return Line(latency_s, (seconds - latency_s) / many)
