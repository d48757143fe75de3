# SPDX-License-Identifier: Apache-2.0
"""How many tokens a request will emit: guessed from those that ended.

Nobody knows that when it comes; the one thing it says is its limit,
`max_output_tokens`. An output stops by itself, after near exponential lengths,
or at its limit, which says only that it would have been longer. So the mean
until it stops is the tokens of all outputs over the number of those that
stopped: where limits are ample it is the mean output, where outputs always run
to their limits (as in a trace, which has no others) the limit is the guess.
What is left of a request that still runs is guessed the same, whatever it has
emitted.
"""

import math

from mooncake_jax.conductor.running_mean import DECAY
from mooncake_jax.conductor.running_mean import PRIOR_WEIGHT
from mooncake_jax.conductor.running_mean import RunningMean


class OutputLengths:
  """Tokens of outputs, from a prior on.

  Attributes:
    until_stop: mean tokens until an output stops by itself.
  """

  def __init__(self, prior: float):
    self._ended = RunningMean(prior)
    self._tokens, self._stops = prior * PRIOR_WEIGHT, PRIOR_WEIGHT
    self.until_stop = prior

  def add(self, num_tokens: int, limit: int) -> None:
    """An output ended, at its limit or before."""
    self._ended.add(max(num_tokens, 1))
    self._tokens = DECAY * self._tokens + num_tokens
    self._stops = DECAY * self._stops + (num_tokens < limit)
    self.until_stop = self._tokens / self._stops

  @property
  def mean(self) -> float:
    """Of outputs, whatever ended them."""
    return self._ended.mean

  def expected(self, limit: int) -> float:
    """Tokens that a request with this limit, or as many left, will emit."""
    mean = self.until_stop
    return -mean * math.expm1(-limit / mean)
