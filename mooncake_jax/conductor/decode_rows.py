# SPDX-License-Identifier: Apache-2.0
"""The requests of one decode instance, as arrays: who decodes at a given time.

Each is there from its first token, which is predicted until it came, for as
many steps as it has tokens left; outputs that stop before their limit do so at
random (`output_lengths`). Suffix R is a request; a free row has no tokens left.
"""

from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.arrays import ZERO


class Batch(NamedTuple):
  """Rows and context expected in a step, shares counted."""

  rows: float
  context_tokens: float


class DecodeRows:
  """Rows that come and go.

  Attributes:
    first_s_R: when each one's first token comes or came.
    context_R: tokens of prompt and output so far.
    left_R: tokens that it may still emit.
    most_R: tokens that it might emit when it came.
    tail_R: its TBT in steps, see `decode_choice.tail`.
  """

  def __init__(self):
    self._free: list[int] = []
    self.first_s_R = np.zeros(0)
    self.context_R = np.zeros(0)
    self.left_R = np.zeros(0)
    self.most_R = np.ones(0)
    self.tail_R = np.zeros(0)

  def add(
    self,
    first_s: float,
    prompt_tokens: int,
    max_output_tokens: int,
    tail: float,
  ) -> int:
    """Takes in a request; returns its row."""
    if not self._free:
      self._grow()
    r = self._free.pop()
    self.first_s_R[r] = first_s
    self.context_R[r] = prompt_tokens
    self.left_R[r] = self.most_R[r] = max_output_tokens
    self.tail_R[r] = tail
    return r

  def remove(self, r: int) -> None:
    """Its row is free for another."""
    self.left_R[r] = self.context_R[r] = 0.0
    self._free.append(r)

  def at(
    self, time_s: float, now_s: float, step_s: float, until_stop: float
  ) -> Batch:
    """What decodes at `time_s` if steps take `step_s` until then.

    Args:
      until_stop: mean tokens until an output stops by itself.
    """
    # Tokens that each will have emitted by then, from now on.
    emitted_R = np.maximum(self.first_s_R, now_s)
    np.subtract(time_s, emitted_R, out=emitted_R)
    emitted_R /= step_s
    share_R = (emitted_R < self.left_R).astype(np.float64)
    share_R[emitted_R < ZERO] = ZERO
    np.maximum(emitted_R, ZERO, out=emitted_R)
    share_R *= np.exp(emitted_R / -until_stop)
    emitted_R += self.context_R
    return Batch(float(share_R.sum()), float(share_R @ emitted_R))

  def _grow(self) -> None:
    """Twice as many rows."""
    size = len(self.left_R)
    more = max(size, 16)
    self._free += range(size + more - 1, size - 1, -1)
    for name in ('first_s_R', 'context_R', 'left_R', 'most_R', 'tail_R'):
      longer = np.append(getattr(self, name), np.ones(more))
      setattr(self, name, longer)
    self.left_R[size:] = 0.0
