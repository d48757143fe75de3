# SPDX-License-Identifier: Apache-2.0
"""The costs of all prefill instances at once, as arrays; [I] one an instance.

Few instances differ and few prefixes do, so seconds of prefill are asked of
the cost model once a kind of instance and prefix, and then spread.
"""

from collections.abc import Sequence

import numpy as np

from mooncake_jax.conductor.work_costs import PREFIX_LINKS
from mooncake_jax.conductor.work_costs import WorkCosts
from mooncake_jax.costs.model import Link


class Fleet:
  """Prefill instances in rows, as far as they do not change.

  Attributes:
    latency_s_I, block_s_I: a link's seconds, idle: latency + blocks * block.
  """

  def __init__(self, names: Sequence[str], work: Sequence[WorkCosts]):
    """Takes names and costs in order; alike instances share one value."""
    self.names = tuple(names)
    self.work_I = tuple(work)
    self.kinds = tuple(dict.fromkeys(work))
    rows = {kind: k for k, kind in enumerate(self.kinds)}
    self.kind_I = np.array([rows[w] for w in work], np.int64)
    self.latency_s_I: dict[Link, np.ndarray] = {}
    self.block_s_I: dict[Link, np.ndarray] = {}
    for link in PREFIX_LINKS:
      lines = [w.links[link] for w in work]
      self.latency_s_I[link] = np.array([line.latency_s for line in lines])
      self.block_s_I[link] = np.array([line.block_s for line in lines])

  def prompt_s(
    self, num_tokens: int, prefix_blocks_XI: np.ndarray, block_size_tokens: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of prefill on a prefix, and of its first chunk.

    Both [..., I] like the prefixes.
    """
    if len(self.kinds) == 1:
      return _spread(
        self.kinds[0], num_tokens, prefix_blocks_XI, block_size_tokens
      )
    seconds_2XI = np.empty((2, *prefix_blocks_XI.shape))
    for k, kind in enumerate(self.kinds):
      here = self.kind_I == k
      seconds_2XI[..., here] = _spread(
        kind, num_tokens, prefix_blocks_XI[..., here], block_size_tokens
      )
    return seconds_2XI[0], seconds_2XI[1]


def _spread(
  work: WorkCosts,
  num_tokens: int,
  prefix_blocks_X: np.ndarray,
  block_size_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
  counts = np.bincount(prefix_blocks_X.ravel())
  seconds, first_s = np.zeros((2, len(counts)))
  for blocks in counts.nonzero()[0].tolist():
    prefix_tokens = blocks * block_size_tokens
    prompt_s = work.prompt_s(num_tokens, prefix_tokens)
    new_tokens = num_tokens - prefix_tokens
    seconds[blocks] = prompt_s
    first_s[blocks] = prompt_s * min(
      work.belief.chunk_tokens / max(new_tokens, 1), 1.0
    )
  return seconds[prefix_blocks_X], first_s[prefix_blocks_X]
