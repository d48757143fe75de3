# SPDX-License-Identifier: Apache-2.0
"""How an instance cuts prompts into chunks.

'fixed' chunks have `chunk_tokens`; 'dynamic' ones take as long as the first
would, so the later are smaller; 'auto' takes the one size with which the
prompt is through the stages first: a short prompt, or one stage, goes as few
large chunks, a long one through a pipeline as smaller ones. Sizes are those
that the engine has programs for.
"""

from dataclasses import dataclass

from mooncake_jax.cluster_spec import Chunking
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.costs.chunks import chunk_stops
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.pipeline import best_chunk_tokens


@dataclass(frozen=True)
class ChunkPlan:
  """One instance's rule.

  Attributes:
    sizes: chunks that the engine has programs for, in rising order.
    stage_layers: layers of each stage.
    costs: measured seconds; None will do for 'fixed'.
  """

  chunking: Chunking
  sizes: tuple[int, ...]
  stage_layers: tuple[int, ...]
  costs: CostModel | None = None

  def __post_init__(self):
    if self.chunking != 'fixed' and self.costs is None:
      raise ValueError(
        f'ClusterSpec.chunking={self.chunking!r} needs the costs of a chunk: '
        'Cluster(..., costs=...)'
      )

  def stops(self, num_tokens: int, prefix_tokens: int) -> tuple[int, ...]:
    """Where the chunks of tokens [prefix_tokens, num_tokens) end."""
    size, costs = self.sizes[-1], self.costs
    if self.chunking == 'dynamic':
      return chunk_stops(
        costs, num_tokens, prefix_tokens, size, 'dynamic', self.sizes[0]
      )
    if self.chunking == 'auto':
      assert costs is not None
      size = best_chunk_tokens(
        costs, num_tokens, prefix_tokens, self.stage_layers, self.sizes
      )
    return chunk_stops(costs, num_tokens, prefix_tokens, size, 'fixed')


def chunk_plan(
  spec: ClusterSpec, stage_layers: tuple[int, ...], costs: CostModel | None
) -> ChunkPlan:
  """The rule of a cluster's prefill instances.

  Raises:
    ValueError: the spec needs costs and there are none.
  """
  return ChunkPlan(spec.chunking, spec.chunk_buckets, stage_layers, costs)
