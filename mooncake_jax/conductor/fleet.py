# SPDX-License-Identifier: Apache-2.0
"""The costs of all prefill instances at once, as arrays; [I] one an instance.

Few instances differ and few prefixes do, so seconds of prefill are asked of
the cost model once a kind of instance and prefix, and then spread.
"""

from collections.abc import Sequence

import numpy as np

from mooncake_jax.conductor.arrays import distinct
from mooncake_jax.conductor.work_costs import PREFIX_LINKS
from mooncake_jax.conductor.work_costs import WorkCosts
from mooncake_jax.costs.model import Link


class Fleet:
  """Prefill instances in rows, as far as they do not change.

  Attributes:
    latency_s_I, block_s_I: a link's seconds, idle: latency + blocks * block.
    no_blocks_I: none for each, not to be written to.
    computed_block_s: what a block of prefix saves at least, on any of them.
  """

  def __init__(self, names: Sequence[str], work: Sequence[WorkCosts]):
    """Takes names and costs in order; alike instances share one value."""
    self.names = tuple(names)
    self.work_I = tuple(work)
    self.kinds = tuple(dict.fromkeys(work))
    rows = {kind: k for k, kind in enumerate(self.kinds)}
    self.kind_I = np.array([rows[w] for w in work], np.int64)
    self.no_blocks_I = np.zeros(len(work), np.int64)
    self.computed_block_s = min(
      (kind.block_s for kind in self.kinds), default=0.0
    )
    self.latency_s_I: dict[Link, np.ndarray] = {}
    self.block_s_I: dict[Link, np.ndarray] = {}
    for link in PREFIX_LINKS:
      lines = [w.links[link] for w in work]
      self.latency_s_I[link] = np.array([line.latency_s for line in lines])
      self.block_s_I[link] = np.array([line.block_s for line in lines])

  def prompt_s(
    self, num_tokens: int, prefix_blocks_I: np.ndarray, block_size_tokens: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of prefill on a prefix, and of its first chunk, [I] both."""
    if len(self.kinds) == 1:
      return _spread(
        self.kinds[0], num_tokens, prefix_blocks_I, block_size_tokens
      )
    seconds_I, first_s_I = np.empty((2, len(prefix_blocks_I)))
    for k, kind in enumerate(self.kinds):
      here = self.kind_I == k
      seconds_I[here], first_s_I[here] = _spread(
        kind, num_tokens, prefix_blocks_I[here], block_size_tokens
      )
    return seconds_I, first_s_I


def _spread(
  work: WorkCosts,
  num_tokens: int,
  prefix_blocks_I: np.ndarray,
  block_size_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
  chunk_tokens = work.belief.chunk_tokens
  lengths = distinct(prefix_blocks_I)  # mostly one, or few
  size = max(lengths, default=0) + 1
  seconds, first_s = np.empty(size), np.empty(size)
  for length in lengths:
    prefix_tokens = length * block_size_tokens
    prompt_s = work.prompt_s(num_tokens, prefix_tokens)
    new_tokens = num_tokens - prefix_tokens
    seconds[length] = prompt_s
    share = chunk_tokens / new_tokens if new_tokens > chunk_tokens else 1.0
    first_s[length] = prompt_s * share
  return seconds[prefix_blocks_I], first_s[prefix_blocks_I]
