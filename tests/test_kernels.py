# SPDX-License-Identifier: Apache-2.0
"""Kernels of accelerators: they lower from here, and give the same numbers.

Interpreted on a CPU they compute what they would on their devices; JAX's own
kernels can't be lowered without one and run in scripts/device_check.py.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import plain_tokens
from engine_pieces import random_tokens
from engine_pieces import tiny_spec
from model_pieces import LLAMA
from model_pieces import make_mesh
from model_pieces import normal
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.model import sharding
from mooncake_jax.model.attention import attend
from mooncake_jax.model.kernels import gathered
from mooncake_jax.model.kernels import gpu
from mooncake_jax.model.kernels import tpu
from mooncake_jax.model.params import init_params

PAGE_TOKENS = 16
STARTS = (0, 100, 37)
KERNELS: dict[str, Any] = {
  'gpu': functools.partial(gpu.attend, interpret=True),
  'tpu': functools.partial(tpu.attend, interpret=True),
  'gathered': functools.partial(gathered.cudnn, implementation='xla'),
}
Checks = jax.export.DisabledSafetyCheck
UNCHECKED = [
  Checks.custom_call(name)
  for name in ('__gpu$xla.gpu.triton', 'tpu_custom_call')
]


def make_inputs(T: int, K: int, G: int, H: int) -> Any:
  """Queries and pages of rows at STARTS; the last lacks some of T > 1."""
  B, P = len(STARTS), 12
  kv_LP2CKH = normal((2, 1 + B * P, 2, PAGE_TOKENS, K, H))
  q_BTKGH = normal((B, T, K, G, H), 1)
  rng = np.random.default_rng(0)
  table_BP = 1 + rng.permutation(B * P).reshape(B, P).astype(np.int32)
  start_B = jnp.array(STARTS, jnp.int32)
  stop_B = start_B + T - (T > 1) * jnp.array([0, 0, 5], jnp.int32)
  return (
    q_BTKGH,
    kv_LP2CKH,
    jnp.int32(1),
    jnp.asarray(table_BP),
    start_B,
    stop_B,
  )


@pytest.mark.parametrize('window', [None, 50])
@pytest.mark.parametrize(
  ('T', 'K', 'G', 'H'), [(1, 3, 3, 64), (24, 3, 3, 64), (1, 2, 4, 128)]
)
@pytest.mark.parametrize('kernel', KERNELS)
def test_kernels_equal_the_portable_path(kernel, T, K, G, H, window):
  args = make_inputs(T, K, G, H)
  portable: Any = jax.jit(functools.partial(attend, window=window))
  expected_BTKGH = portable(*args)
  run: Any = jax.jit(functools.partial(KERNELS[kernel], window=window))
  found_BTKGH = run(*args)
  valid = slice(None) if T == 1 else slice(T - 5)
  np.testing.assert_allclose(
    found_BTKGH[:, valid], expected_BTKGH[:, valid], atol=1e-5
  )


@pytest.mark.parametrize('kernel', ['gpu', 'tpu'])
def test_a_row_without_keys_leaves_no_nan(kernel):
  q, kv, layer, table, start, stop = make_inputs(1, 2, 4, 64)
  o = KERNELS[kernel](q, kv, layer, table, start * 0, stop * 0, window=None)
  assert np.isfinite(o).all()


@pytest.mark.parametrize('T', [1, 64])
@pytest.mark.parametrize(
  ('head_dim', 'dtype'), [(64, jnp.float32), (128, jnp.bfloat16)]
)
@pytest.mark.parametrize(
  ('platform', 'call'), [('cuda', 'triton'), ('tpu', 'tpu_custom_call')]
)
def test_attention_lowers(platform, call, head_dim, dtype, T):
  q, kv, *rest = make_inputs(T, 3, 3, head_dim)
  args = (q.astype(dtype), kv.astype(dtype), *rest)
  kernels: Any = (('jnp', False), ('pallas', True))
  for kernel, has_call in kernels:
    run = jax.jit(functools.partial(attend, window=50, kernel=kernel))
    exported = jax.export.export(
      run, platforms=[platform], disabled_checks=UNCHECKED
    )(*args)
    assert (call in exported.mlir_module()) == has_call


@pytest.mark.parametrize('T', [1, 24])
def test_no_product_of_float32_is_cut_on_accelerators(T):
  lowered = (
    jax.jit(attend)
    .trace(*make_inputs(T, 3, 3, 64))
    .lower(lowering_platforms=('tpu',))
  )
  text = lowered.as_text()
  products = [line for line in text.splitlines() if 'dot_general' in line]
  assert len(products) >= 2
  for line in products:
    assert 'precision = [HIGHEST, HIGHEST]' in line, line


def test_heads_split_over_devices_equal_whole():
  mesh = make_mesh(LLAMA, 2)
  q, kv, *rest = make_inputs(1, 4, 2, 16)
  expected = attend(q, kv, *rest)
  split = functools.partial(sharding.named_sharding, mesh)
  q = jax.device_put(q, split('BTKGH', q.shape))
  kv = jax.device_put(kv, split('LP2CKH', kv.shape))
  rest = sharding.place(rest, mesh)
  found = jax.jit(functools.partial(attend, kernel='pallas'))(q, kv, *rest)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_pages_that_are_no_power_of_two_are_refused():
  q, kv, *rest = make_inputs(1, 2, 2, 64)
  with pytest.raises(ValueError, match='page_tokens=12'):
    gpu.attend(q, kv[:, :, :, :12], *rest, window=None)


def test_the_engine_takes_another_kernel():
  config = replace(MODEL, head_dim=16)
  layout = replace(
    LAYOUT, token_layer_bytes=256, page_tokens=16, block_size_tokens=16
  )
  params = init_params(config, jax.random.key(0))
  tokens = random_tokens(20, 3)
  found = []
  for attention in ('jnp', 'pallas'):
    spec = tiny_spec('a', attention=attention)
    with DeviceBackend(config, layout, [spec], params) as backend:
      found.append(plain_tokens(Desk(backend), tokens, 4))
  assert found[0] == found[1]
  with pytest.raises(ValueError, match='attention='):
    tiny_spec('a', attention='fastest')
