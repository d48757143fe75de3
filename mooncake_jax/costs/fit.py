# SPDX-License-Identifier: Apache-2.0
"""Fits a `PolynomialCost` to measured times.

Every coefficient is a physical cost, so none may be negative: non-negative
least squares on relative errors (each sample counts by its percentage, or the
few long prompts would decide alone). Coefficients bear the names of the
fields they are for:

  cost = PolynomialCost(**fit_prefill(p).coefficients,
                        **fit_decode(d).coefficients,
                        **fit_link(l, 'onload').coefficients, ...)
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mooncake_jax.costs.model import Link


class PrefillSample(NamedTuple):
  """A chunk that took `seconds`."""

  chunk_tokens: int
  prefix_tokens: int
  seconds: float


class DecodeSample(NamedTuple):
  """A decode step that took `seconds`; context is summed over its rows."""

  batch_size: int
  context_tokens: int
  seconds: float


class LinkSample(NamedTuple):
  """A transfer that took `seconds`."""

  num_bytes: int
  seconds: float


@dataclass(frozen=True)
class Fit:
  """What a fit found, and how far it is off.

  Attributes:
    coefficients: by field name of `PolynomialCost`.
    mape: mean of |predicted - measured| / measured, 0.05 is 5 %.
    num_samples: how many it was made from.
  """

  coefficients: dict[str, float]
  mape: float
  num_samples: int


def fit_prefill(samples: Sequence[PrefillSample]) -> Fit:
  """c, gamma, b and a of t(L, x), see `costs.model`.

  Raises:
    ValueError: fewer than 4 samples, or one whose time is not > 0.
  """
  names = (
    'prefill_base_s',
    'prefill_s_per_prefix_token',
    'prefill_s_per_token',
    'prefill_s_per_token_squared',
  )
  rows = [(1, L, x, 2 * L * x + x * x) for x, L, _ in samples]
  return _fit('fit_prefill', names, rows, [s.seconds for s in samples])


def fit_decode(samples: Sequence[DecodeSample]) -> Fit:
  """d0, d1 and d2 of t(B, S), see `costs.model`.

  Raises:
    ValueError: fewer than 3 samples, or one whose time is not > 0.
  """
  names = ('decode_base_s', 'decode_s_per_row', 'decode_s_per_context_token')
  rows = [(1, s.batch_size, s.context_tokens) for s in samples]
  return _fit('fit_decode', names, rows, [s.seconds for s in samples])


def fit_link(samples: Sequence[LinkSample], link: Link) -> Fit:
  """Latency and bandwidth of one link.

  Raises:
    ValueError: fewer than 2 samples, one whose time is not > 0, or times that
      do not grow with the bytes (no bandwidth can be told).
  """
  names = ('latency', 's_per_byte')
  rows = [(1, s.num_bytes) for s in samples]
  line = _fit('fit_link', names, rows, [s.seconds for s in samples])
  latency_s, s_per_byte = line.coefficients.values()
  largest = max(samples, key=lambda sample: sample.num_bytes)
  if s_per_byte * largest.num_bytes < 1e-6 * largest.seconds:
    raise ValueError(
      f'fit_link: {link=} times do not grow with num_bytes in '
      f'{len(samples)} samples: measure larger transfers'
    )
  coefficients = {
    f'{link}_bytes_per_s': 1 / s_per_byte,
    f'{link}_latency_s': latency_s,
  }
  return Fit(coefficients, line.mape, line.num_samples)


def _fit(
  what: str,
  names: tuple[str, ...],
  rows: Iterable[tuple[float, ...]],
  seconds: Sequence[float],
) -> Fit:
  from scipy.optimize import nnls  # 0.5 s: paid by who fits, not who imports

  if len(seconds) < len(names):
    raise ValueError(
      f'{what}: {len(seconds)} samples cannot give {len(names)} coefficients'
    )
  for i, value in enumerate(seconds):
    if not (np.isfinite(value) and value > 0):
      raise ValueError(f'{what}: samples[{i}].seconds={value!r} must be > 0')
  relative = np.array(rows, float) / np.array(seconds, float)[:, None]
  # Columns differ by many orders of magnitude: fit them on one scale.
  scale = np.linalg.norm(relative, axis=0)
  scale[scale == 0] = 1
  solution, _ = nnls(relative / scale, np.ones(len(seconds)))
  found = solution / scale
  mape = float(np.mean(np.abs(relative @ found - 1)))
  return Fit(dict(zip(names, found.tolist())), mape, len(seconds))
