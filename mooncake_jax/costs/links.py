# SPDX-License-Identifier: Apache-2.0
"""What a link between instances takes, as it was measured: a line.

The same form as the cost models have: a latency, then bytes at a bandwidth.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
import time
from typing import Any
from typing import NamedTuple

import numpy as np

from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.model import LINKS
from mooncake_jax.costs.model import Links
from mooncake_jax.costs.perturbed import PerturbedCost
from mooncake_jax.costs.table import TableCost

LONG_ENOUGH_S = 0.05  # for what else the machine does not to count
# Rounds, of which the median counts (what a transfer mostly takes), and how
# long they last at least.
ROUNDS, ROUNDS_S = 7, 0.5
PAUSE_S = 1e-3  # before each: transfers come to threads that wait for them


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

  One alone, two together, four, and so on until they take `LONG_ENOUGH_S` or
  would be more than `max_bytes`.

  Args:
    send: so many pieces at once; returns when all have arrived.

  Raises:
    OSError: `send` does.
  """
  send(1)
  counts = [1, 2]
  while _seconds(send, counts[-1]) < LONG_ENOUGH_S:
    if 2 * counts[-1] * piece_bytes > max_bytes:
      break
    counts.append(2 * counts[-1])
  begun_s, rounds = time.perf_counter(), []
  while len(rounds) < ROUNDS or time.perf_counter() - begun_s < ROUNDS_S:
    rounds.append([_seconds(send, count) for count in counts])
  usual_s = dict(zip(counts, map(median, zip(*rounds))))
  return fitted(piece_bytes, usual_s)


def fitted(piece_bytes: int, times_s: Mapping[int, float]) -> LinkSpeed:
  """The line through what so many pieces took, off by the least shares.

  One through the first and the last would be far off in between, as pieces
  are quicker the more of them there are. Least squares; neither latency nor
  bandwidth is negative.
  """
  counts, seconds = map(np.array, (list(times_s), list(times_s.values())))
  terms = np.stack([1 / seconds, counts / seconds], axis=1)  # add up to 1
  (latency_s, each_s), *_ = np.linalg.lstsq(terms, np.ones(len(terms)))
  if latency_s < 0 or each_s <= 0:
    each = terms[:, 1]
    latency_s, each_s = 0.0, each.sum() / (each @ each)
  return LinkSpeed(float(latency_s), float(piece_bytes / each_s))


def with_links(costs: CostModel, speeds: Sequence[LinkSpeed]) -> CostModel:
  """The costs with links between instances as measured, the median of all.

  Raises:
    ValueError: nothing was measured, or costs of this form have no such links.
  """
  if not speeds:
    raise ValueError('no link between instances was measured')
  latency_s = median(speed.latency_s for speed in speeds)
  bytes_per_s = median(speed.bytes_per_s for speed in speeds)
  measured = {
    'copy_bytes_per_s': bytes_per_s,
    'copy_latency_s': latency_s,
    'handoff_bytes_per_s': bytes_per_s,
    'handoff_latency_s': latency_s,
  }
  return _changed(costs, lambda lines: measured)


def with_bandwidth(
  costs: CostModel, share: float, links: Sequence[Link] = LINKS
) -> CostModel:
  """The costs with so much of these links' bandwidth.

  Raises:
    ValueError: costs of this form have no such links.
  """
  names = [f'{link}_bytes_per_s' for link in links]
  return _changed(
    costs, lambda lines: {name: getattr(lines, name) * share for name in names}
  )


def _changed(
  costs: CostModel, change: Callable[[Links], Mapping[str, float]]
) -> CostModel:
  """The costs with other lines, wherever those are kept."""
  if isinstance(costs, Links):
    changed: Mapping[str, Any] = change(costs)
    return replace(costs, **changed)
  if isinstance(costs, TableCost):
    return replace(costs, links=_changed(costs.links, change))
  if isinstance(costs, PerturbedCost):
    return replace(costs, costs=_changed(costs.costs, change))
  raise ValueError(f'{type(costs).__name__} has no line a link')


def _seconds(send: Callable[[int], None], count: int) -> float:
  time.sleep(PAUSE_S)
  begun_s = time.perf_counter()
  send(count)
  return time.perf_counter() - begun_s
