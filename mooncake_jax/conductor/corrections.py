# SPDX-License-Identifier: Apache-2.0
"""Online correction of predictions: one factor a term and instance.

What was observed over what the cost model alone had said is a ratio; its
logarithm is followed slowly and in bounded steps, so that one outlier moves a
factor by at most `GAIN * MAX_STEP`, and a lasting change is learnt within some
tens of requests. A straggler's predictions grow with it, and it is avoided.
"""

import math

import numpy as np

GAIN = 0.1
MAX_STEP = 1.0
LIMIT = math.log(16.0)


class Correction:
  """Factors of one term, [I] one an instance; all 1 where it is off."""

  def __init__(self, enabled: bool):
    self._enabled = enabled
    self._log_I = np.zeros(0)
    self.factor_I = np.ones(0)

  def join(self, i: int) -> None:
    """Row i is a new instance, or another one than before."""
    while len(self._log_I) <= i:
      self._log_I = np.append(self._log_I, 0.0)
      self.factor_I = np.append(self.factor_I, 1.0)
    self._log_I[i], self.factor_I[i] = 0.0, 1.0

  def observe(
    self, i: int, predicted_s: float, factor: float, observed_s: float
  ) -> None:
    """Learns from one prediction that `factor` had corrected."""
    if not self._enabled or predicted_s <= 0 or observed_s <= 0:
      return
    error = math.log(observed_s * factor / predicted_s) - self._log_I[i]
    step = min(max(error, -MAX_STEP), MAX_STEP)
    log = min(max(self._log_I[i] + GAIN * step, -LIMIT), LIMIT)
    self._log_I[i], self.factor_I[i] = log, math.exp(log)
