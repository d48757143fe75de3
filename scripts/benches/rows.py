# SPDX-License-Identifier: Apache-2.0
"""A benchmark's figures, and how its times are taken."""

from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
import time
from typing import Any

import jax


@dataclass(frozen=True)
class Point:
  """Where a figure stands in a plot: one panel a case, one line a way.

  Attributes:
    panel: 'store put, 4 at once'.
    way: 'memcpy'.
    size_bytes: of a block.
  """

  panel: str
  way: str
  size_bytes: int


@dataclass(frozen=True)
class Curve:
  """What a figure comes from, over time: a panel of its own.

  Attributes:
    points: (x, y).
    x_label, y_label: what they are, with units.
    marks: x at which something happened.
    about: what the marks are.
  """

  points: tuple[tuple[float, float], ...]
  x_label: str
  y_label: str
  marks: tuple[float, ...] = ()
  about: str = ''


@dataclass(frozen=True)
class Row:
  """One figure.

  Attributes:
    metric: 'prefill.gemm_share', unique over all benchmarks.
    value: None where what it is measured with is not installed.
    reference: what the figure or its target rests on.
    target: the figure must reach it; None where nothing is asked of it.
    at_most: the target is an upper limit, not a lower one.
    point: of a figure that is one of a series.
    curve: of a figure that sums one up.
  """

  metric: str
  value: float | None
  unit: str
  reference: str = ''
  target: float | None = None
  at_most: bool = False
  point: Point | None = None
  curve: Curve | None = None

  @property
  def ok(self) -> bool:
    if self.target is None or self.value is None:
      return True
    if self.at_most:
      return bool(self.value <= self.target)
    return bool(self.value >= self.target)

  def to_dict(self) -> dict[str, Any]:
    return {
      'metric': self.metric,
      'value': None if self.value is None else float(self.value),
      'unit': self.unit,
      'reference': self.reference,
      'target': self.target,
      'ok': self.ok,
      **({'point': asdict(self.point)} if self.point else {}),
      **({'curve': asdict(self.curve)} if self.curve else {}),
    }


def best_s(work: Callable[[], Any], repeats: int) -> float:
  """Seconds of the fastest of `repeats` calls, after one to warm up.

  The fastest, not the mean: what else the machine does only adds time.
  """
  jax.block_until_ready(work())
  times_s = []
  for _ in range(repeats):
    start_s = time.perf_counter()
    jax.block_until_ready(work())
    times_s.append(time.perf_counter() - start_s)
  return min(times_s)
