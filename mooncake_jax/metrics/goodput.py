# SPDX-License-Identifier: Apache-2.0
"""Goodput: the highest request rate that still keeps the SLOs.

As in DistServe and arXiv 2407.00079 section 8.1: the highest rate at which a
required share of *all* requests (90 % by default) is effective. FAST'25's
effective request capacity is the other view, the share at one given rate.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_jax.costs.model import check_positive


@dataclass(frozen=True)
class Goodput:
  """What the search found.

  Attributes:
    requests_per_s: the highest rate that was run and attained the target;
      None if no rate down to the lowest one tried did.
    bound_requests_per_s: the lowest rate run that failed; None if none did,
      so that the true goodput may lie above max_rate.
    runs: (rate, attainment) of every run, in order.
  """

  requests_per_s: float | None
  bound_requests_per_s: float | None
  runs: tuple[tuple[float, float], ...]


def goodput(
  run_at_rate: Callable[[float], float],
  target: float = 0.9,
  start_rate: float = 1.0,
  tolerance: float = 0.05,
  min_rate: float = 1e-3,
  max_rate: float = 1e4,
  step: float = 2.0,
) -> Goodput:
  """Steps up or down until the rate brackets the target, then bisects.

  Args:
    run_at_rate: serves the workload at so many requests per second and
      returns its effective request capacity, 0 to 1. Called once a rate;
      assumed to fall with the rate (where it wavers, a crossing is found).
    target: required attainment.
    start_rate: the first rate to run.
    tolerance: stop when the bracket is narrower than this share of its lower
      end.
    min_rate, max_rate: never run outside of these.
    step: factor of the steps; a small one where start_rate is a good guess.

  Raises:
    ValueError: a target outside (0, 1], rates that are not
      0 < min_rate <= start_rate <= max_rate, a tolerance not above 0, a step
      not above 1.
  """
  if not 0 < target <= 1:
    raise ValueError(f'goodput: target={target!r} must be in (0, 1]')
  if not 0 < min_rate <= start_rate <= max_rate:
    raise ValueError(
      f'goodput: 0 < min_rate={min_rate!r} <= start_rate={start_rate!r} <= '
      f'max_rate={max_rate!r} must hold'
    )
  check_positive('goodput: tolerance', tolerance)
  check_positive('goodput: step - 1', step - 1)
  runs: list[tuple[float, float]] = []

  def attains(rate: float) -> bool:
    runs.append((rate, run_at_rate(rate)))
    return runs[-1][1] >= target

  low, high = _bracket(attains, start_rate, min_rate, max_rate, step)
  while low is not None and high is not None and high > low * (1 + tolerance):
    middle = (low * high) ** 0.5
    if attains(middle):
      low = middle
    else:
      high = middle
  return Goodput(low, high, tuple(runs))


def _bracket(
  attains: Callable[[float], bool],
  rate: float,
  lowest: float,
  highest: float,
  step: float,
) -> tuple[float | None, float | None]:
  """A rate that attains and one that does not; None where the limit ends it."""
  if attains(rate):
    low = rate
    while low < highest:
      rate = min(step * low, highest)
      if not attains(rate):
        return low, rate
      low = rate
    return low, None
  high = rate
  while high > lowest:
    rate = max(high / step, lowest)
    if attains(rate):
      return rate, high
    high = rate
  return None, high
