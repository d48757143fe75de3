# SPDX-License-Identifier: Apache-2.0
"""Numbers for arrays of a few instances, where a call costs as much as it does.

On such arrays numpy takes twice as long where an operand is a Python number or
of another type than the rest, which is converted at every call.
"""

from collections.abc import Collection

import numpy as np

ZERO = np.zeros(())
ONE = np.ones(())
NO_BLOCKS = np.zeros((), np.int64)
FEW = 64


def distinct(count_I: np.ndarray) -> Collection[int]:
  """The different numbers; a set of few is made sooner than an array."""
  if len(count_I) <= FEW:
    return set(count_I.tolist())
  return np.bincount(count_I).nonzero()[0].tolist()


def pick(score_I: np.ndarray, able_I: np.ndarray, number: int) -> int:
  """The able row of least score; of equal ones the number-th, round and round.

  At least one must be able.
  """
  if np.count_nonzero(able_I) < len(able_I):
    score_I = np.where(able_I, score_I, np.inf)
  best = (score_I == score_I[score_I.argmin()]).nonzero()[0]
  return best.item(number % len(best))
