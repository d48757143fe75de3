# SPDX-License-Identifier: Apache-2.0
"""Service level objectives: the two limits an effective request keeps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SLO:
  """Limits of FAST'25 section 5.1 (30 s; 100, 200 or 300 ms there).

  Attributes:
    ttft_s: arrival to first token.
    tbt_s: mean of a request's longest 10 % of token intervals.
  """

  ttft_s: float = 30.0
  tbt_s: float = 0.1

  def __post_init__(self):
    for name in ('ttft_s', 'tbt_s'):
      value = getattr(self, name)
      if not value > 0:
        raise ValueError(f'SLO.{name}={value!r} must be > 0 seconds')

  def kept(
    self, ttft_s: float | None, tbt_s: float | None
  ) -> tuple[bool, bool]:
    """Whether a completed request kept the limits of TTFT and of TBT.

    Who has no first token misses that limit; who has no interval keeps TBT's.
    """
    return (
      ttft_s is not None and ttft_s <= self.ttft_s,
      tbt_s is None or tbt_s <= self.tbt_s,
    )
