# SPDX-License-Identifier: Apache-2.0
"""What a link between instances takes, as it was measured: a line.

The same form as the cost models have: a latency, then bytes at a bandwidth.
"""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
import time
from typing import NamedTuple

from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import PolynomialCost
from mooncake_jax.costs.table import TableCost

LONG_ENOUGH_S = 0.05  # for what else the machine does not to count
ROUNDS = 7  # of which the median counts: what a transfer mostly takes


class LinkSpeed(NamedTuple):
  """Seconds of a transfer: `latency_s` and so many bytes a second."""

  latency_s: float
  bytes_per_s: float

  def transfer_s(self, num_bytes: int) -> float:
    return self.latency_s + num_bytes / self.bytes_per_s


def measure_link(
  send: Callable[[int], None], piece_bytes: int, max_bytes: int
) -> LinkSpeed:
  """Measures a link by pieces of the size that transfers have.

  One alone gives the latency; as many together as take `LONG_ENOUGH_S`, but
  at most `max_bytes`, the bandwidth.

  Args:
    send: so many pieces at once; returns when all have arrived.

  Raises:
    OSError: `send` does.
  """
  send(1)
  one_s = _usual_s(send, 1)
  count = 2
  while _seconds(send, count) < LONG_ENOUGH_S:
    if 2 * count * piece_bytes > max_bytes:
      break
    count *= 2
  many_s = _usual_s(send, count)
  each_s = max(many_s - one_s, many_s / count / 10) / (count - 1)
  return LinkSpeed(max(one_s - each_s, 0.0), piece_bytes / each_s)


def with_links(
  costs: CostModel, speeds: Sequence[LinkSpeed]
) -> PolynomialCost | TableCost:
  """The costs with links between instances as measured, the median of all.

  Raises:
    ValueError: nothing was measured, or costs of this form have no such links.
  """
  if not speeds:
    raise ValueError('no link between instances was measured')
  if isinstance(costs, TableCost):
    return replace(costs, links=with_links(costs.links, speeds))
  if not isinstance(costs, PolynomialCost):
    raise ValueError(f'{type(costs).__name__} takes no measured links')
  latency_s = median(speed.latency_s for speed in speeds)
  bytes_per_s = median(speed.bytes_per_s for speed in speeds)
  return replace(
    costs,
    copy_bytes_per_s=bytes_per_s,
    copy_latency_s=latency_s,
    handoff_bytes_per_s=bytes_per_s,
    handoff_latency_s=latency_s,
  )


def _usual_s(send: Callable[[int], None], count: int) -> float:
  return median(_seconds(send, count) for _ in range(ROUNDS))


def _seconds(send: Callable[[int], None], count: int) -> float:
  begun_s = time.perf_counter()
  send(count)
  return time.perf_counter() - begun_s
