# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode promise for a load is counted step by step."""

from collections import Counter

import numpy as np
import pytest

from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Emitted
from mooncake_jax.request import TokenSegment
from scripts.benches import mixed


def emitted(names: str, time_s: float) -> TokensEmitted:
  tries = tuple((name, 0) for name in names)
  made = Emitted(tries, TokenSegment(time_s, 0.0, 1), (1,) * len(tries))
  return TokensEmitted(time_s, 'decode0', made)


def test_steps_are_counted_by_their_rows():
  first = [emitted('a', 1.0), emitted('b', 1.5)]
  steps = [emitted('a', 2.0), emitted('ab', 3.0)]
  assert mixed._steps([*first, *steps], 2) == Counter({0: 2, 1: 1, 2: 1})


def test_a_load_is_promised_what_its_works_take_alone():
  alone = {
    'chunk': np.array([0.5, 1.0]),
    'steps': np.outer(np.array(mixed.ROWS), (0.01, 0.02)),
  }
  steps = Counter({0: 2, 1: 10, 3: 100})
  assert mixed._promised(alone, steps) == pytest.approx([4.1, 8.2])
