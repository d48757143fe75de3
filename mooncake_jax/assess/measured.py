# SPDX-License-Identifier: Apache-2.0
"""Recompute or fetch, as measured: times to first token of served prompts.

A trial is one prompt through the project's own cluster on devices, its prefix
computed, or read from where it was put before. What a fetch costs is then what
it adds to a prompt whose prefix is on the device already, overlap, locks and
queues included:

  recompute - HBM   what computing the prefix takes
  DRAM - HBM        what of its fetch the rest of the prompt does not hide

So the least bandwidth that pays is bytes / (recompute - HBM), the left side of
FAST'25's formula (`break_even.py`) times G; beside it stands its right side.
G is what the longest prompt reached here.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.assess.break_even import first_winning
from mooncake_jax.assess.break_even import formula_bytes_per_flop
from mooncake_jax.assess.break_even import formula_tokens
from mooncake_jax.assess.break_even import MEDIA
from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.model_config import ModelConfig

RECOMPUTE, NEAREST = 'recompute', 'HBM'


@dataclass(frozen=True)
class Trial:
  """One prompt.

  Attributes:
    source: 'recompute', or the medium that its prefix was read from.
    ttft_s: from its arrival to its first token.
    fetch_s: that the transfer of its prefix took, 0 where there was none.
  """

  source: str
  prefix_tokens: int
  ttft_s: float
  fetch_s: float


@dataclass(frozen=True)
class Measured:
  """What `scripts/break_even.py` keeps, to be read again.

  Attributes:
    backend: 'device', or 'ray' where each instance is a process.
    rest_tokens: of each prompt, behind its prefix.
    environment: of the machine.
  """

  title: str
  model: ModelConfig
  backend: str
  kv_dtype_bytes: int
  rest_tokens: int
  seconds: float
  trials: tuple[Trial, ...]
  environment: Mapping[str, Any]


@dataclass(frozen=True)
class Length:
  """One prefix length; seconds at P50 and P99.

  Attributes:
    ttft_s: by source.
    least_bytes_per_s: from which on fetching pays, as measured; None where
      computing the prefix took no measurable time.
    formula_bytes_per_s: the same by the formula.
  """

  prefix_tokens: int
  num_bytes: int
  ttft_s: dict[str, tuple[float, float]]
  least_bytes_per_s: float | None
  formula_bytes_per_s: float


@dataclass(frozen=True)
class Medium:
  """Where a prefix may lie.

  Attributes:
    bytes_per_s: of the longest prefix's fetches, P50; None: nothing is moved.
    tokens, sure_tokens: the shortest measured prefix from which on a fetch at
      P50, and at P99, beats recomputing at P50; None: never.
    formula_tokens: the same by the formula at `bytes_per_s`.
  """

  name: str
  bytes_per_s: float | None
  tokens: int | None
  sure_tokens: int | None
  formula_tokens: int


@dataclass(frozen=True)
class MeasuredEven:
  """The whole comparison.

  Attributes:
    flops_per_s: G.
    repeats: the fewest trials that a P50 and a P99 rest on.
  """

  flops_per_s: float
  repeats: int
  lengths: tuple[Length, ...]
  media: tuple[Medium, ...]

  @property
  def off(self) -> tuple[float, float]:
    """Least and most of the formula's least bandwidth over the measured."""
    ratios = [
      each.formula_bytes_per_s / each.least_bytes_per_s
      for each in self.lengths
      if each.least_bytes_per_s
    ]
    return (min(ratios), max(ratios)) if ratios else (0.0, 0.0)


def measured_even(measured: Measured) -> MeasuredEven:
  """What follows from the trials.

  Raises:
    ValueError: there are none of recomputing, or of a prefix in HBM.
  """
  times = _by_source(measured.trials)
  for name in (RECOMPUTE, NEAREST):
    if name not in times:
      raise ValueError(f'Measured.trials: none with source={name!r}')
  lengths = sorted(times[RECOMPUTE])
  longest, model = lengths[-1], measured.model
  flops_per_s = (
    model.prefill_flops(0, longest + measured.rest_tokens)
    / (_pair(times[RECOMPUTE][longest])[0])
  )
  rows = tuple(_length(measured, times, n, flops_per_s) for n in lengths)
  fetches = _by_source(measured.trials, 'fetch_s')
  media = tuple(
    _medium(measured, rows, fetches[name][longest], name, flops_per_s)
    for name in times
    if name != RECOMPUTE
  )
  counts = [len(t) for by_length in times.values() for t in by_length.values()]
  return MeasuredEven(flops_per_s, min(counts), rows, media)


def _by_source(
  trials: Sequence[Trial], name: str = 'ttft_s'
) -> dict[str, dict[int, list[float]]]:
  found: dict[str, dict[int, list[float]]] = {}
  for trial in trials:
    lengths = found.setdefault(trial.source, {})
    lengths.setdefault(trial.prefix_tokens, []).append(getattr(trial, name))
  return {name: found[name] for name in (RECOMPUTE, *MEDIA) if name in found}


def _length(
  measured: Measured,
  times: Mapping[str, Mapping[int, Sequence[float]]],
  length: int,
  flops_per_s: float,
) -> Length:
  num_bytes = kv_bytes(measured.model, length, measured.kv_dtype_bytes)
  ttft_s = {name: _pair(found[length]) for name, found in times.items()}
  computed_s = ttft_s[RECOMPUTE][0] - ttft_s[NEAREST][0]
  asked = formula_bytes_per_flop(
    measured.model, length, measured.kv_dtype_bytes
  )
  least = num_bytes / computed_s if computed_s > 0 else None
  return Length(length, num_bytes, ttft_s, least, flops_per_s * asked)


def _medium(
  measured: Measured,
  rows: Sequence[Length],
  fetches_s: Sequence[float],
  name: str,
  flops_per_s: float,
) -> Medium:
  fetch_s, lengths = _pair(fetches_s)[0], [row.prefix_tokens for row in rows]
  bytes_per_s = rows[-1].num_bytes / fetch_s if fetch_s else None
  wins = [
    [row.ttft_s[name][rank] < row.ttft_s[RECOMPUTE][0] for row in rows]
    for rank in (0, 1)
  ]
  asked = 0
  if bytes_per_s is not None:
    asked = formula_tokens(
      measured.model, bytes_per_s / flops_per_s, measured.kv_dtype_bytes
    )
  return Medium(
    name,
    bytes_per_s,
    first_winning(lengths, wins[0]),
    first_winning(lengths, wins[1]),
    asked,
  )


def _pair(seconds: Sequence[float]) -> tuple[float, float]:
  p50, p99 = np.percentile(seconds, (50, 99))
  return float(p50), float(p99)
