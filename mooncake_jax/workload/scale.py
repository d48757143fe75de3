# SPDX-License-Identifier: Apache-2.0
"""Cuts and scales a trace so that a small machine can serve a slice of it.

How a row scales in length. With T tokens per hash id and t = T * length_scale
(a whole number), every id stands for t tokens instead of T: complete blocks
stay complete, the partial tail of u tokens becomes round(u * t / T) of them
but at least 1 and at most t - 1, and so len(hash_ids) = ceil(length / t) holds
and exactly the same blocks are shared and complete. Example, T = 512, t = 32:

  1300 tokens, ids [0, 7, 9]: 512 + 512 + 276  ->  32 + 32 + 17 = 81 tokens
  1024 tokens, ids [0, 7]:    512 + 512        ->  32 + 32      = 64 tokens

So the hit rate in tokens is kept to the rounding of tails, whatever the block
size, if that scales too. Outputs scale by `output_scale`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import math
from typing import Literal

import numpy as np

from mooncake_jax.costs.model import check_count
from mooncake_jax.costs.model import check_positive
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow


@dataclass(frozen=True)
class TraceScale:
  """What `scale_trace` does, in this order; the defaults do nothing.

  Attributes:
    start_s, duration_s: keep arrivals in [start_s, start_s + duration_s) of
      the trace, and let the first moment of it be 0. None is to the end.
    jitter_s: delay each arrival by a uniform share of this, then sort. 3.0
      undoes the 3 s ticks of the published conversation trace.
    seed: of the jitter.
    length_scale: tokens per hash id times this, 1/16 makes 512 into 32.
    output_scale: output lengths times this; None is length_scale.
    max_prompt_tokens, max_output_tokens: after scaling; None is any.
    too_long: longer prompts are dropped, or cut to max_prompt_tokens. Outputs
      are always cut.
    num_requests: keep the first so many of what is left; None is all.
    time_scale: 2.0 replays twice as fast.
    repeats: the same rows so often, one time after another, each time with
      hash ids of its own: a longer trace of the same kind, for a study of
      scale.

  Raises:
    ValueError: a value out of its range.
  """

  start_s: float = 0.0
  duration_s: float | None = None
  jitter_s: float = 0.0
  seed: int = 0
  length_scale: float = 1.0
  output_scale: float | None = None
  max_prompt_tokens: int | None = None
  max_output_tokens: int | None = None
  too_long: Literal['drop', 'cut'] = 'drop'
  num_requests: int | None = None
  time_scale: float = 1.0
  repeats: int = 1

  def __post_init__(self):
    for name in ('start_s', 'jitter_s'):
      check_positive(f'TraceScale.{name}', getattr(self, name), zero=True)
    check_count('TraceScale.seed', self.seed, 0)
    for name in 'duration_s length_scale output_scale time_scale'.split():
      value = getattr(self, name)
      if value is not None:
        check_positive(f'TraceScale.{name}', value)
    for name in ('max_prompt_tokens', 'max_output_tokens', 'num_requests'):
      value = getattr(self, name)
      if value is not None:
        check_count(f'TraceScale.{name}', value)
    check_count('TraceScale.repeats', self.repeats)
    if self.too_long not in ('drop', 'cut'):
      raise ValueError(
        f"TraceScale.too_long={self.too_long!r} must be 'drop' or 'cut'"
      )


@dataclass(frozen=True)
class ScaledTrace:
  """A trace ready to be made requests.

  Attributes:
    rows: sorted by arrival.
    tokens_per_hash_id: what one hash id now stands for.
    num_dropped, num_cut: prompts that were too long.
  """

  rows: list[TraceRow]
  tokens_per_hash_id: int
  num_dropped: int = 0
  num_cut: int = 0


def scale_trace(
  rows: Sequence[TraceRow],
  scale: TraceScale,
  tokens_per_hash_id: int = TOKENS_PER_HASH_ID,
) -> ScaledTrace:
  """Applies `scale`; see there for the order.

  Raises:
    ValueError: length_scale makes no whole number >= 2 of tokens per hash id.
  """
  tokens = scaled_tokens_per_hash_id(scale.length_scale, tokens_per_hash_id)
  output_scale = scale.output_scale
  if output_scale is None:
    output_scale = scale.length_scale
  window = _jitter(_slice(rows, scale), scale)
  longs = [
    _scale_row(row, tokens_per_hash_id, tokens, output_scale) for row in window
  ]
  fits, num_dropped, num_cut = _limit(longs, scale, tokens)
  kept = [
    replace(row, timestamp_s=row.timestamp_s / scale.time_scale)
    for row in fits[: scale.num_requests]
  ]
  kept = _repeat(kept, scale.repeats)
  return ScaledTrace(kept, tokens, num_dropped, num_cut)


def scaled_tokens_per_hash_id(
  length_scale: float, tokens_per_hash_id: int
) -> int:
  """t = T * length_scale, see the module."""
  exact = tokens_per_hash_id * length_scale
  tokens = round(exact)
  # A block of one token could have no partial tail.
  if tokens < min(2, tokens_per_hash_id) or not math.isclose(exact, tokens):
    raise ValueError(
      f'TraceScale.{length_scale=} makes {exact:g} of {tokens_per_hash_id} '
      'tokens per hash id, must be a whole number >= 2'
    )
  return tokens


def _slice(rows: Iterable[TraceRow], scale: TraceScale) -> list[TraceRow]:
  duration_s = math.inf if scale.duration_s is None else scale.duration_s
  kept = [
    replace(row, timestamp_s=row.timestamp_s - scale.start_s)
    for row in rows
    if 0 <= row.timestamp_s - scale.start_s < duration_s
  ]
  return sorted(kept, key=lambda row: row.timestamp_s)


def _jitter(rows: list[TraceRow], scale: TraceScale) -> list[TraceRow]:
  if not scale.jitter_s:
    return rows
  delays_s = np.random.default_rng(scale.seed).random(len(rows))
  delayed = [
    replace(row, timestamp_s=row.timestamp_s + float(delay) * scale.jitter_s)
    for row, delay in zip(rows, delays_s)
  ]
  return sorted(delayed, key=lambda row: row.timestamp_s)


def _repeat(rows: list[TraceRow], repeats: int) -> list[TraceRow]:
  """The rows after themselves, a mean gap behind the last one."""
  if repeats == 1 or not rows:
    return rows
  last_s = rows[-1].timestamp_s
  period_s = last_s + last_s / len(rows)
  num_ids = 1 + max(max(row.hash_ids, default=0) for row in rows)
  return [
    replace(
      row,
      timestamp_s=row.timestamp_s + i * period_s,
      hash_ids=tuple(hash_id + i * num_ids for hash_id in row.hash_ids),
    )
    for i in range(repeats)
    for row in rows
  ]


def _scale_row(
  row: TraceRow, old: int, new: int, output_scale: float
) -> TraceRow:
  complete, tail = divmod(row.input_tokens, old)
  if tail:
    tail = min(max(round(tail * new / old), 1), max(new - 1, 1))
  return replace(
    row,
    input_tokens=complete * new + tail,
    output_tokens=max(1, round(row.output_tokens * output_scale)),
  )


def _limit(
  rows: list[TraceRow], scale: TraceScale, tokens_per_hash_id: int
) -> tuple[list[TraceRow], int, int]:
  """The rows within the limits, how many were dropped, how many cut."""
  if scale.max_output_tokens is not None:
    rows = [_cut_output(row, scale.max_output_tokens) for row in rows]
  most = scale.max_prompt_tokens
  if most is None:
    return rows, 0, 0
  num_long = sum(row.input_tokens > most for row in rows)
  if scale.too_long == 'drop':
    return [row for row in rows if row.input_tokens <= most], num_long, 0
  return (
    [_cut_prompt(row, most, tokens_per_hash_id) for row in rows],
    0,
    num_long,
  )


def _cut_prompt(
  row: TraceRow, num_tokens: int, tokens_per_hash_id: int
) -> TraceRow:
  """At most the first `num_tokens` tokens of a prompt, with their ids."""
  if row.input_tokens <= num_tokens:
    return row
  num_ids = -(-num_tokens // tokens_per_hash_id)
  return replace(row, input_tokens=num_tokens, hash_ids=row.hash_ids[:num_ids])


def _cut_output(row: TraceRow, num_tokens: int) -> TraceRow:
  return replace(row, output_tokens=min(row.output_tokens, num_tokens))
