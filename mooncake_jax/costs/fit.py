# SPDX-License-Identifier: Apache-2.0
"""Fits a `PolynomialCost` to measured times.

Every coefficient is a physical cost, so none may be negative: non-negative
least squares on relative errors (each sample counts by its percentage, or the
few long prompts would decide alone). Of what it was measured to be, where a
time is the best of several; of what is fitted, where times are `noisy`: else
those that happen to be short would count for too much, and the fit's mean not
be theirs. Coefficients bear the names of the fields they are for:

  cost = PolynomialCost(**fit_prefill(p).coefficients,
                        **fit_decode(d).coefficients,
                        **fit_link(l, 'onload').coefficients, ...)
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
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


Sample = PrefillSample | DecodeSample | LinkSample


@dataclass(frozen=True)
class Fit:
  """What a fit found, and how far it is off.

  Attributes:
    coefficients: by field name of `PolynomialCost`.
    mape: mean of |predicted - measured| / measured, 0.05 is 5 %; where times
      are noisy, of what is predicted.
    num_samples: how many it was made from.
  """

  coefficients: dict[str, float]
  mape: float
  num_samples: int


class Terms(NamedTuple):
  """What a cost is linear in: coefficients' names, and a sample's factors."""

  names: tuple[str, ...]
  row: Callable[[Any], tuple[float, ...]]


PREFILL = Terms(
  (
    'prefill_base_s',
    'prefill_s_per_prefix_token',
    'prefill_s_per_token',
    'prefill_s_per_token_squared',
  ),
  lambda s: (
    1,
    s.prefix_tokens,
    s.chunk_tokens,
    (2 * s.prefix_tokens + s.chunk_tokens) * s.chunk_tokens,
  ),
)
DECODE = Terms(
  ('decode_base_s', 'decode_s_per_row', 'decode_s_per_context_token'),
  lambda s: (1, s.batch_size, s.context_tokens),
)

# Of a noisy fit, whose weights come from the one before: it has settled then.
ROUNDS = 10

LINE = Terms(('latency', 's_per_byte'), lambda s: (1, s.num_bytes))


def fit_prefill(samples: Sequence[PrefillSample], noisy: bool = False) -> Fit:
  """c, gamma, b and a of t(L, x), see `costs.model`.

  Raises:
    ValueError: fewer than 4 samples, or one whose time is not > 0.
  """
  return _fit('fit_prefill', PREFILL, samples, noisy)


def fit_decode(samples: Sequence[DecodeSample], noisy: bool = False) -> Fit:
  """d0, d1 and d2 of t(B, S), see `costs.model`.

  Raises:
    ValueError: fewer than 3 samples, or one whose time is not > 0.
  """
  return _fit('fit_decode', DECODE, samples, noisy)


def fit_terms(terms: Terms, samples: Sequence[Sample]) -> Fit:
  """Any cost that is linear in its terms.

  Raises:
    ValueError: fewer samples than terms, or one whose time is not > 0.
  """
  return _fit('fit_terms', terms, samples)


def held_out_errors(terms: Terms, samples: Sequence[Sample]) -> np.ndarray:
  """Relative errors where a fit to every other sample was not made.

  The fit has the samples 0, 2, 4, ..., the errors are of 1, 3, 5, ...

  Raises:
    ValueError: as the fit of that half.
  """
  half = _fit('held_out_errors', terms, samples[::2])
  return relative_errors(terms, half.coefficients, samples[1::2])


def relative_errors(
  terms: Terms, coefficients: Mapping[str, float], samples: Sequence[Sample]
) -> np.ndarray:
  """(predicted - measured) / measured of each sample."""
  rows = np.array([terms.row(sample) for sample in samples], float)
  found = np.array([coefficients[name] for name in terms.names])
  return rows @ found / np.array([s.seconds for s in samples]) - 1


def fit_link(samples: Sequence[LinkSample], link: Link) -> Fit:
  """Latency and bandwidth of one link.

  Raises:
    ValueError: fewer than 2 samples, one whose time is not > 0, or times that
      do not grow with the bytes (no bandwidth can be told).
  """
  line = _fit('fit_link', LINE, samples)
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
  what: str, terms: Terms, samples: Sequence[Sample], noisy: bool = False
) -> Fit:
  names, seconds = terms.names, [sample.seconds for sample in samples]
  if len(seconds) < len(names):
    raise ValueError(
      f'{what}: {len(seconds)} samples cannot give {len(names)} coefficients'
    )
  for i, value in enumerate(seconds):
    if not (np.isfinite(value) and value > 0):
      raise ValueError(f'{what}: samples[{i}].seconds={value!r} must be > 0')
  rows = np.array([terms.row(sample) for sample in samples], float)
  measured = np.array(seconds, float)
  if noisy:
    fitted = np.full_like(measured, measured.mean())
    for _ in range(ROUNDS):
      solution = _least_squares(rows, measured, fitted)
      fitted = np.maximum(rows @ solution, 1e-3 * measured.mean())
    errors = measured / fitted - 1
  else:
    solution = _least_squares(rows, measured, measured)
    errors = rows @ solution / measured - 1
  found = dict(zip(names, solution.tolist()))
  return Fit(found, float(np.mean(np.abs(errors))), len(seconds))


def _least_squares(
  rows: np.ndarray, measured: np.ndarray, size: np.ndarray
) -> np.ndarray:
  """Coefficients >= 0 of the least errors in shares of `size`."""
  from scipy.optimize import nnls  # 0.5 s: paid by who fits, not who imports

  relative = rows / size[:, None]
  # Columns differ by many orders of magnitude: fit them on one scale.
  scale = np.linalg.norm(relative, axis=0)
  scale[scale == 0] = 1
  solution, _ = nnls(relative / scale, measured / size)
  return solution / scale
