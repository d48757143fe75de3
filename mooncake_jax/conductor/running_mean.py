# SPDX-License-Identifier: Apache-2.0
"""A mean that forgets slowly, from a prior on."""

PRIOR_WEIGHT = 8.0
DECAY = 0.999


class RunningMean:
  """Of numbers > 0; the prior counts as `PRIOR_WEIGHT` of them."""

  def __init__(self, prior: float):
    if not prior > 0:
      raise ValueError(f'{prior=} must be > 0')
    self._sum = prior * PRIOR_WEIGHT
    self._weight = PRIOR_WEIGHT

  def add(self, value: float) -> None:
    self._sum = DECAY * self._sum + value
    self._weight = DECAY * self._weight + 1

  @property
  def mean(self) -> float:
    return self._sum / self._weight
