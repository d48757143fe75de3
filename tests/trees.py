# SPDX-License-Identifier: Apache-2.0
"""Comparing trees of parameters."""

from typing import Any

import jax
import numpy as np


def same(a: Any, b: Any) -> bool:
  """Whether two trees have the same structure, dtypes and bits."""
  equal = jax.tree.map(
    lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b
  )
  return all(jax.tree.leaves(equal))
