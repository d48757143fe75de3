# SPDX-License-Identifier: Apache-2.0
"""What hit rate a store would need: reuse that a trace does not have, or tell.

A prompt is supposed to begin as an earlier one does, by a share of its length.
Arrivals and lengths stay. What would be needed is then read off the goodputs,
in between by a straight line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import numpy as np

from mooncake_jax.workload.trace import TraceRow

SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Supposed:
  """Goodputs where prompts share so much; requests per second.

  Attributes:
    share: of a prompt that begins as an earlier one does; in whole blocks.
    hit_rate: what the store made of it at its goodput.
    coupled: of coupled instances that cache prefixes too.
    apart: of prefill and decode apart without a store, whatever is shared.
  """

  share: float
  hit_rate: float
  store: float
  coupled: float
  apart: float

  @property
  def gain(self) -> float:
    """Of the store over the better of the others; 0 where nothing serves."""
    others = max(self.coupled, self.apart)
    if others == 0:
      return 0.0 if self.store == 0 else float('inf')
    return self.store / others - 1


def sharing(
  rows: Sequence[TraceRow], share: float, block_size_tokens: int, seed: int = 0
) -> list[TraceRow]:
  """The rows with ids of `block_size_tokens` tokens that are shared so.

  Whom a prompt follows is drawn among all earlier ones that are long enough.
  """
  rng, next_id = np.random.default_rng(seed), 0
  found: list[TraceRow] = []
  whole = np.array([row.input_tokens // block_size_tokens for row in rows])
  for i, row in enumerate(rows):
    shared = round(share * row.input_tokens / block_size_tokens)
    shared = min(shared, int(whole[i]))
    earlier = np.flatnonzero(whole[:i] >= shared)
    parent: tuple[int, ...] = ()
    if shared and len(earlier):
      parent = found[int(rng.choice(earlier))].hash_ids[:shared]
    own = -(-row.input_tokens // block_size_tokens) - len(parent)
    ids = (*parent, *range(next_id, next_id + own))
    next_id += own
    found.append(replace(row, hash_ids=ids, hashed=True))
  return found


def needed_hit_rate(
  supposed: Sequence[Supposed], least_gain: float
) -> float | None:
  """From which hit rate on the store is a gain; None: at none that was tried.

  Args:
    supposed: with rising shares.
  """
  before = None
  for each in supposed:
    if each.gain >= least_gain:
      if before is None or each.gain == float('inf'):
        return each.hit_rate
      part = (least_gain - before.gain) / (each.gain - before.gain)
      return before.hit_rate + part * (each.hit_rate - before.hit_rate)
    before = each
  return None
