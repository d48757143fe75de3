# SPDX-License-Identifier: Apache-2.0
"""Does the device compute what it should? Nothing is measured unless it does.

Some versions of JAX were wrong on some GPUs in the simplest eager operations
(jax#40633), so these come first.
"""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.request import Sampling
from scripts.device_checks.part import Budget
from scripts.device_checks.part import Figures
from scripts.device_checks.shapes import TINY

TOLERANCE = 2e-3  # of float32 through a model, some of it by TF32


def check(figures: Figures, budget: Budget) -> None:
  """Raises AssertionError with the first wrong result."""
  for test in (_eager, _statistics, _product, _chunks, _memories):
    figures[test.__name__.strip('_')] = float(test())


def _eager() -> float:
  x = np.linspace(0.1, 9, 4097, dtype=np.float32)
  found = np.asarray(jnp.sqrt(jnp.asarray(x)))
  np.testing.assert_allclose(found, np.sqrt(x), rtol=1e-6)
  np.testing.assert_array_equal(np.asarray(jnp.ones(4097) + 1), 2)
  return np.abs(found - np.sqrt(x)).max()


def _statistics() -> float:
  """Mean and deviation of normal numbers, alike in every process."""
  x = np.asarray(jax.random.normal(jax.random.key(0), (1 << 20,)))
  assert np.isfinite(x).all()
  assert abs(x.mean()) < 5e-3 and abs(x.std() - 1) < 5e-3, (x.mean(), x.std())
  return abs(x.mean())


def _product() -> float:
  rng = np.random.default_rng(0)
  a, b = rng.normal(size=(2, 512, 512)).astype(np.float32)
  dot = functools.partial(jnp.dot, precision='highest')
  error = np.abs(np.asarray(jax.jit(dot)(a, b)) - a.astype(float) @ b).max()
  assert error < 1e-2, f'matrix product is off by {error}'
  return error


def _chunks() -> float:
  """A prompt in chunks through pages gives what it gives as a whole."""
  with jax.default_matmul_precision('highest'):
    whole_V, cut_V = _logits((100,)), _logits((37, 64, 100))
  error = np.abs(whole_V - cut_V).max()
  assert np.isfinite(whole_V).all() and whole_V.std() > 1e-2
  assert error < TOLERANCE, f'chunks and whole differ by {error}'
  return error


def _logits(stops) -> np.ndarray:
  weights = model_params.init_params(TINY, jax.random.key(1))
  kv = pages.init_pool(TINY, 9, 16)
  tokens = np.arange(128, dtype=np.int32) % 97
  table_P = np.arange(1, 9, dtype=np.int32)
  start, logits_V = 0, None
  for stop in stops:
    tokens_T = np.zeros(128, np.int32)
    tokens_T[: stop - start] = tokens[start:stop]
    scalars = np.int32(start), np.int32(stop - start)
    rows = SamplingRows.of([Sampling()])
    _, logits_V, kv = prefill_chunk(
      weights,
      TINY,
      kv,
      *jax.device_put((tokens_T, table_P, *scalars)),
      jax.device_put(rows),
    )
    start = stop
  return np.asarray(logits_V)


def _memories() -> float:
  """Bytes come back from pinned host memory as they went."""
  x = jax.random.bits(jax.random.key(2), (1 << 16,), jnp.uint32)
  device = x.sharding.with_memory_kind('device')
  host = x.sharding.with_memory_kind('pinned_host')
  back = jax.device_put(jax.device_put(x, host), device)
  np.testing.assert_array_equal(np.asarray(back), np.asarray(x))
  return 0.0
