# SPDX-License-Identifier: Apache-2.0
"""Attention of a decode step: any lengths, any pages, against plain numpy."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from model_pieces import normal
from mooncake_jax.model import decode_attention
from mooncake_jax.model.attention import attend

K, G, H, L, C = 3, 2, 8, 2, 4
LAYER = 1


def make_pool(num_pages: int) -> jax.Array:
  return normal((L, num_pages, 2, C, K, H))


def reference(q_KGH, kv_P2CKH, table_P, stop: int, window: int | None):
  """Float64, one row: its query is its last token's."""
  rows_2SKH = np.concatenate(np.asarray(kv_P2CKH, np.float64)[table_P], 1)
  k_SKH, v_SKH = rows_2SKH[:, :stop]
  s_KGS = np.einsum('KGH,SKH->KGS', np.asarray(q_KGH), k_SKH) / np.sqrt(H)
  first = 0 if window is None else max(stop - window, 0)
  s_KGS[..., :first] = -np.inf
  p_KGS = np.exp(s_KGS - s_KGS.max(-1, keepdims=True))
  p_KGS /= p_KGS.sum(-1, keepdims=True)
  return np.einsum('KGS,SKH->KGH', p_KGS, v_SKH)


@pytest.mark.parametrize('window', [None, 7])
@pytest.mark.parametrize('turn_tokens', [12, 512])
@pytest.mark.parametrize('stops', [(1,), (40,), (40, 40, 40), (40, 0, 3, 17)])
def test_every_row_sees_its_own_keys_once(
  monkeypatch, stops, turn_tokens, window
):
  # 40 tokens fill a row's table: 30 pairs are no multiple of a turn's.
  monkeypatch.setattr(decode_attention, 'TURN_TOKENS', turn_tokens)
  rng = np.random.default_rng(0)
  num_pages, B = 10, len(stops)
  table_BP = 1 + rng.permutation(B * num_pages).reshape(B, -1).astype(np.int32)
  kv_LP2CKH = make_pool(1 + B * num_pages)
  q_BTKGH = normal((B, 1, K, G, H), 1)
  stop_B = jnp.array(stops, jnp.int32)
  start_B = jnp.maximum(stop_B - 1, 0)
  args = (LAYER, jnp.asarray(table_BP), start_B, stop_B)
  run = jax.jit(functools.partial(attend, window=window))
  o_BTKGH = run(q_BTKGH, kv_LP2CKH, *args)
  for row, stop in enumerate(stops):
    if not stop:
      assert np.isfinite(o_BTKGH[row]).all()
      continue
    expected_KGH = reference(
      q_BTKGH[row, 0], kv_LP2CKH[LAYER], table_BP[row], stop, window
    )
    np.testing.assert_allclose(o_BTKGH[row, 0], expected_KGH, atol=1e-5)
