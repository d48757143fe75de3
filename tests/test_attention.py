# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks of queries and keys is dense attention."""

import jax
import numpy as np
import pytest

from mooncake_jax.model import attention

K, G, H, C = 2, 2, 8, 16


def dense(q_TKGH, k_SKH, v_SKH, start: int, window: int | None) -> np.ndarray:
  """Softmax over all keys that each query sees, in float64."""
  position_T1 = start + np.arange(len(q_TKGH))[:, None]
  key_S = np.arange(len(k_SKH))[None]
  seen_TS = key_S <= position_T1
  if window is not None:
    seen_TS &= key_S > position_T1 - window
  s_KGTS = np.einsum('TKGH,SKH->KGTS', q_TKGH, k_SKH) * H**-0.5
  s_KGTS = np.where(seen_TS, s_KGTS, -np.inf)
  p_KGTS = np.exp(s_KGTS - s_KGTS.max(-1, keepdims=True))
  p_KGTS /= p_KGTS.sum(-1, keepdims=True)
  return np.einsum('KGTS,SKH->TKGH', p_KGTS, v_SKH)


@pytest.mark.parametrize('window', [None, 90])
@pytest.mark.parametrize('start, length', [(0, 512), (37, 512), (300, 260)])
def test_a_chunk_of_more_queries_than_a_block(start, length, window):
  T = 2 * attention.QUERY_TOKENS
  stop, rng = start + length, np.random.default_rng(0)
  num_pages = -(-stop // C)
  pages_P = (1 + rng.permutation(num_pages)).astype(np.int32)
  kv = rng.normal(size=(2, num_pages + 1, 2, C, K, H)).astype(np.float32)
  q_TKGH = rng.normal(size=(T, K, G, H)).astype(np.float32)
  attend = jax.jit(attention.attend, static_argnames='window')
  bounds = (np.array([start], np.int32), np.array([stop], np.int32))
  table_BP = np.pad(pages_P, (0, 70 - num_pages))[None]
  got = attend(q_TKGH[None], kv, 1, table_BP, *bounds, window=window)
  keys, values = np.moveaxis(kv[1, pages_P], 1, 0).reshape(2, -1, K, H)
  expected = dense(
    q_TKGH[:length].astype(np.float64),
    keys[:stop],
    values[:stop],
    start,
    window,
  )
  np.testing.assert_allclose(got[0, :length], expected, rtol=0, atol=2e-6)
  assert np.isfinite(np.asarray(got)).all()
