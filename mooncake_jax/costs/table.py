# SPDX-License-Identifier: Apache-2.0
"""A cost model that is a table of measured times, with lines in between.

At one chunk size a chunk's time is a line in its prefix, at one batch size a
step's is a line in its context: so measured sizes have a line each. In between
lines are interpolated, beyond the largest size they go on as between the last
two, below the smallest it stays the smallest one's. No form is assumed across
sizes, so kernels that change with them show. As in a polynomial, a step's time
is linear in the context while its batch stays. It grows with the sizes only as
far as what was measured does.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mooncake_jax.costs.fit import fit_decode
from mooncake_jax.costs.fit import fit_prefill
from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.costs.model import CostModel
from mooncake_jax.costs.model import Link
from mooncake_jax.costs.points import load_points
from mooncake_jax.costs.points import Points


class Line(NamedTuple):
  """Seconds at one size: base_s + s_per_token * tokens."""

  size: int
  base_s: float
  s_per_token: float

  def at(self, tokens: int) -> float:
    return self.base_s + self.s_per_token * tokens


@dataclass(frozen=True)
class TableCost(CostModel):
  """Lines by chunk size and by batch size.

  Attributes:
    prefill: by chunk tokens, in tokens of prefix.
    decode: by rows, in tokens of context of all rows.
    links: whose `transfer_s` this one has.

  Raises:
    ValueError: no lines, sizes that do not rise, a negative time.
  """

  prefill: tuple[Line, ...]
  decode: tuple[Line, ...]
  links: CostModel

  def __post_init__(self):
    for name in ('prefill', 'decode'):
      lines = getattr(self, name)
      sizes = [line.size for line in lines]
      if not lines or sizes != sorted(set(sizes)):
        raise ValueError(f'TableCost.{name}: {sizes=} must rise')
      for i, line in enumerate(lines):
        where = f'TableCost.{name}[{i}]'
        check_count(f'{where}.size', line.size)
        check_positive(f'{where}.base_s', line.base_s, zero=True)
        check_positive(f'{where}.s_per_token', line.s_per_token, zero=True)

  def prefill_s(self, chunk_tokens: int, prefix_tokens: int) -> float:
    return _interpolated(self.prefill, chunk_tokens, prefix_tokens)

  def decode_step_s(self, batch_size: int, context_tokens: int) -> float:
    return _interpolated(self.decode, batch_size, context_tokens)

  def transfer_s(self, num_bytes: int, link: Link) -> float:
    return self.links.transfer_s(num_bytes, link)


def load_table(path: str, links: CostModel) -> TableCost:
  """The table of a file of points (`costs/points.py`) with one lane.

  Raises:
    ValueError: it has more lanes than one, a bad line, or lacks prefill or
      decode points.
    OSError: the file can't be opened.
  """
  lanes = load_points(Path(path))
  if len(lanes) != 1:
    raise ValueError(f'{path}: {len(lanes)} lanes, must be one')
  (points,) = lanes.values()
  return table_of(points, links)


def table_of(points: Points, links: CostModel) -> TableCost:
  """Lines through the points of each size.

  The slope of a size with points at one length alone is that of polynomials
  fitted to all of them.

  Raises:
    ValueError: fewer than 4 prefill or 3 decode points.
  """
  prefill = fit_prefill(points.prefill).coefficients
  decode = fit_decode(points.decode).coefficients
  return TableCost(
    _lines(
      [(s.chunk_tokens, s.prefix_tokens, s.seconds) for s in points.prefill],
      prefill['prefill_s_per_prefix_token'],
      2 * prefill['prefill_s_per_token_squared'],
    ),
    _lines(
      [(s.batch_size, s.context_tokens, s.seconds) for s in points.decode],
      decode['decode_s_per_context_token'],
      0.0,
    ),
    links,
  )


def _lines(
  samples: Sequence[tuple[int, int, float]], slope: float, slope_per_size: float
) -> tuple[Line, ...]:
  """Of (size, tokens, seconds)."""
  by_size: dict[int, list[tuple[int, float]]] = {}
  for size, tokens, seconds in samples:
    by_size.setdefault(size, []).append((tokens, seconds))
  return tuple(
    _line(size, pairs, slope + slope_per_size * size)
    for size, pairs in sorted(by_size.items())
  )


def _line(size: int, pairs: list[tuple[int, float]], slope: float) -> Line:
  """Least squares, each point by its percentage; `slope` where it has none."""
  tokens, seconds = np.array(pairs, float).T
  if np.ptp(tokens):
    slope = max(float(np.polyfit(tokens, seconds, 1, w=1 / seconds)[0]), 0.0)
  base_s = float(np.average(seconds - slope * tokens, weights=seconds**-2))
  return Line(size, max(base_s, 0.0), slope)


def _interpolated(lines: tuple[Line, ...], size: int, tokens: int) -> float:
  if size <= lines[0].size or len(lines) == 1:
    return lines[0].at(tokens)
  i = min(bisect_right(lines, size, key=_size), len(lines) - 1)
  low, high = lines[i - 1], lines[i]
  share = (size - low.size) / (high.size - low.size)
  low_s = low.at(tokens)
  return max(low_s + share * (high.at(tokens) - low_s), 0.0)


def _size(line: Line) -> int:
  return line.size
