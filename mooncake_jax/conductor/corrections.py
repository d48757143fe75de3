# SPDX-License-Identifier: Apache-2.0
"""Online correction of predictions: factors on what the cost model says.

What was observed over what the cost model alone had said is a ratio; its
logarithm is followed slowly and in bounded steps, so that one outlier moves a
factor little and a lasting change is learnt within some tens of requests. A
straggler's predictions grow with it, and it is avoided.
"""

import math

import numpy as np

from mooncake_jax.conductor.running_mean import RunningMean

MAX_STEP = 1.0
LIMIT = math.log(16.0)


class Correction:
  """Factors of one term, [I] one an instance; all 1 where it is off."""

  def __init__(self, enabled: bool, up: float, down: float):
    """Starts without instances.

    Args:
      up, down: what share of an error is taken over, where the factor is too
        low or too high. Equal ones follow the middle; a smaller `up` follows
        the low end, where others' work only adds to what is observed.
    """
    self._enabled = enabled
    self._up, self._down = up, down
    self._log_I = np.zeros(0)
    self.factor_I = np.ones(0)

  def join(self, i: int) -> None:
    """Row i is a new instance, or another one than before."""
    while len(self._log_I) <= i:
      self._log_I = np.append(self._log_I, 0.0)
      self.factor_I = np.append(self.factor_I, 1.0)
    self._log_I[i], self.factor_I[i] = 0.0, 1.0

  def observe(self, i: int, model_s: float, observed_s: float) -> None:
    """Learns from what the cost model alone had said."""
    if not self._enabled or model_s <= 0 or observed_s <= 0:
      return
    error = math.log(observed_s / model_s) - self._log_I[i]
    step = min(max(error, -MAX_STEP), MAX_STEP)
    step *= self._up if step > 0 else self._down
    log = min(max(self._log_I[i] + step, -LIMIT), LIMIT)
    self._log_I[i], self.factor_I[i] = log, math.exp(log)


class Settling(Correction):
  """Takes the mean of the first errors, then follows the middle slowly.

  For what is multiplied by whole queues: it must be right soon, and may not
  waver with each prompt.
  """

  LEAST = 0.02

  def __init__(self, enabled: bool):
    super().__init__(enabled, 1.0, 1.0)
    self._seen: dict[int, int] = {}

  def join(self, i: int) -> None:
    super().join(i)
    self._seen[i] = 1  # the cost model counts as one

  def observe(self, i: int, model_s: float, observed_s: float) -> None:
    self._seen[i] += 1
    self._up = self._down = max(1 / self._seen[i], self.LEAST)
    super().observe(i, model_s, observed_s)


class Odds:
  """How far a prediction is off, of all instances at once.

  A factor that takes over a hundredth of each error, and what is left of them
  as a root mean square of logarithms: what others will do meanwhile shows in
  both. Slow, as errors are known only when requests end.

  Attributes:
    factor: on what is predicted.
  """

  RATE = 0.01
  PRIOR, LEAST = 0.1, 1e-3

  def __init__(self, enabled: bool):
    self._enabled = enabled
    self._squares = RunningMean(self.PRIOR**2)
    self.factor = 1.0

  def observe(self, model_s: float, observed_s: float) -> None:
    """Learns from one request, of which was said `model_s` without a factor."""
    if not self._enabled or model_s <= 0 or observed_s <= 0:
      return
    error = math.log(observed_s / (model_s * self.factor))
    error = min(max(error, -MAX_STEP), MAX_STEP)
    self.factor *= math.exp(self.RATE * error)
    self._squares.add(max(error**2, self.LEAST**2))

  @property
  def spread(self) -> float:
    """Of log(observed / predicted)."""
    return math.sqrt(self._squares.mean)

  def keeps(self, limit_s: np.ndarray | float, said_s: float) -> np.ndarray:
    """How likely what was said to take `said_s` is within the limit.

    What it takes is of logistic distribution around that.
    """
    scale_s = self.spread * said_s * math.sqrt(3) / math.pi
    return 1 / (1 + np.exp(np.minimum((said_s - limit_s) / scale_s, 99.0)))


class WorkCorrection:
  """Seconds that prefills took over those expected, of all instances at once.

  A ratio of sums, so that it holds for a whole queue: where prefixes are
  evicted while requests wait for them, a few take many times what was planned.
  One number, as a queue of hundreds of seconds times each instance's own noise
  would set them apart for nothing.
  """

  KEEP = 0.998
  PRIOR_S = 10.0

  def __init__(self, enabled: bool):
    self._enabled = enabled
    self._taken_s = self._planned_s = self.PRIOR_S
    self.factor = 1.0

  def observe(self, planned_s: float, taken_s: float) -> None:
    """Learns from one request that was prefilled."""
    if not self._enabled:
      return
    self._taken_s = self.KEEP * self._taken_s + taken_s
    self._planned_s = self.KEEP * self._planned_s + planned_s
    self.factor = self._taken_s / self._planned_s


class Lateness:
  """How much later than said first tokens come, of all instances at once.

  Mean lateness, of those that come early none, as a share of what was said;
  sums, so that long waits count for more than short ones. Errors of a logistic
  distribution are in nine of ten cases below `MARGIN` such means.

  Attributes:
    margin: factor on what is said, for it to be kept in nine of ten cases.
  """

  KEEP = 0.998
  PRIOR_S = 1.0
  MARGIN = 3.2

  def __init__(self, enabled: bool):
    self._enabled = enabled
    self._late_s, self._said_s = 0.0, self.PRIOR_S
    self.margin = 1.0

  def observe(self, said_s: float, taken_s: float) -> None:
    """Learns from one request whose first token came."""
    if not self._enabled:
      return
    self._late_s = self.KEEP * self._late_s + max(taken_s - said_s, 0.0)
    self._said_s = self.KEEP * self._said_s + said_s
    self.margin = 1 + self.MARGIN * self._late_s / self._said_s
