# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels for CPUs give the portable path's numbers."""

import functools
import logging
import subprocess
from types import SimpleNamespace
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from model_pieces import LLAMA
from model_pieces import make_mesh
from model_pieces import make_params
from model_pieces import normal
from mooncake_jax.model import fuse
from mooncake_jax.model import kernels
from mooncake_jax.model import pages
from mooncake_jax.model import quantize
from mooncake_jax.model import sharding
from mooncake_jax.model.attention import attend
from mooncake_jax.model.decode import decode_logits
from mooncake_jax.model.decode import DecodeState
from mooncake_jax.model.kernels import cpu
from mooncake_jax.model.kernels.native import build
from mooncake_jax.model.params import materialize_unembed
from mooncake_jax.model.products import product
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.request import Sampling

needs_compiler = pytest.mark.skipif(
  not build.is_there(), reason='no C++ compiler'
)
LAYER = 1
CPU = SimpleNamespace(platform='cpu')
TPU = SimpleNamespace(platform='tpu')
GPU = SimpleNamespace(platform='gpu')


def chosen(choice, device, pages_shape=(64, 8, 128), dtype='float32') -> str:
  return kernels.chosen(choice, device, pages_shape, jnp.dtype(dtype))


def make_inputs(stops, page_tokens, K, G, H, dtype) -> Any:
  """Queries at their rows' ends, pages in any order; 130 tokens are most."""
  B, P = len(stops), -(-130 // page_tokens)
  rng = np.random.default_rng(0)
  shape = (LAYER + 1, 1 + B * P, 2, page_tokens, K, H)
  kv_LP2CKH = jnp.asarray(rng.normal(size=shape)).astype(jnp.float32)
  if dtype == 'int8':
    kv_LP2CKH = jnp.round(40 * kv_LP2CKH)
  q_BTKGH = normal((B, 1, K, G, H), 1)
  table_BP = 1 + rng.permutation(B * P).reshape(B, P).astype(np.int32)
  stop_B = jnp.array(stops, jnp.int32)
  start_B = jnp.maximum(stop_B - 1, 0)
  return (
    q_BTKGH / (40 if dtype == 'int8' else 1),
    kv_LP2CKH.astype(dtype),
    LAYER,
    jnp.asarray(table_BP),
    start_B,
    stop_B,
  )


@needs_compiler
@pytest.mark.parametrize(
  ('dtype', 'page_tokens', 'K', 'G', 'H', 'window'),
  [
    ('float32', 64, 3, 3, 64, None),
    ('float32', 100, 1, 5, 80, 100),
    ('bfloat16', 16, 2, 4, 128, None),
    ('int8', 4, 3, 2, 8, 7),
    ('float8_e4m3fn', 64, 2, 1, 24, None),
  ],
)
def test_equals_the_portable_path(dtype, page_tokens, K, G, H, window):
  # One token, pages cut anywhere, no token, a full table.
  args = make_inputs((1, 77, 0, 130, 64), page_tokens, K, G, H, dtype)
  expected_BTKGH, found_BTKGH = (
    jax.jit(functools.partial(attend, window=window, kernel=kernel))(*args)
    for kernel in ('jnp', 'cpu')
  )
  scale = float(jnp.abs(expected_BTKGH).max())
  np.testing.assert_allclose(found_BTKGH, expected_BTKGH, atol=2e-6 * scale)
  assert not found_BTKGH[2].any()


@needs_compiler
def test_queries_keep_their_dtype():
  q, *rest = make_inputs((5, 9), 4, 2, 2, 16, 'bfloat16')
  found = attend(q.astype(jnp.bfloat16), *rest, kernel='cpu')
  expected = attend(q.astype(jnp.bfloat16).astype(jnp.float32), *rest)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=2e-2)


@needs_compiler
def test_large_scores_overflow_nothing():
  q, kv, *rest = make_inputs((130, 64), 16, 2, 2, 64, 'float32')
  args = (1e4 * q, kv, *rest)
  found = attend(*args, kernel='cpu')
  np.testing.assert_allclose(found, attend(*args), atol=1e-3)


@needs_compiler
def test_chunks_and_other_dtypes_take_the_portable_path():
  q, kv, *rest = make_inputs((130, 64), 16, 2, 2, 16, 'float16')
  for T in (1, 3):
    args = (jnp.repeat(q, T, axis=1), kv, *rest)
    found = attend(*args, kernel='cpu')
    np.testing.assert_array_equal(found, attend(*args))


@needs_compiler
def test_a_donated_pool_is_written_in_place_and_never_copied():
  q, kv, _, *rest = make_inputs((130, 64), 16, 2, 2, 64, 'float32')
  num_bytes = kv.nbytes

  def step(q, kv):
    for i in range(LAYER + 1):  # as layers: each writes what came of the last
      kv = kv.at[i, 3].set(q.sum())
      q += attend(q, kv, i, *rest, kernel='cpu')
    return q, kv

  compiled = jax.jit(step, donate_argnums=1).lower(q, kv).compile()
  used = compiled.memory_analysis()
  assert used is not None
  assert used.alias_size_in_bytes == num_bytes
  assert used.temp_size_in_bytes < num_bytes / 4
  where = kv.unsafe_buffer_pointer()
  _, kv = compiled(q, kv)
  assert kv.unsafe_buffer_pointer() == where


@needs_compiler
def test_long_rows_are_cut_for_threads():
  # Long enough for several pieces wherever XLA has several threads.
  B, P, C, K, G, H = 2, 40, 64, 3, 3, 64
  kv = normal((1, 1 + B * P, 2, C, K, H))
  q = normal((B, 1, K, G, H), 1)
  table_BP = 1 + jnp.arange(B * P, dtype=jnp.int32).reshape(B, P)
  stop_B = jnp.array([P * C - 3, 700], jnp.int32)
  args = (q, kv, 0, table_BP, stop_B - 1, stop_B)
  found = jax.jit(functools.partial(attend, kernel='cpu'))(*args)
  np.testing.assert_allclose(found, attend(*args), atol=1e-6)


@needs_compiler
@pytest.mark.parametrize('dtype', cpu.WEIGHT_DTYPES)
@pytest.mark.parametrize(
  ('rows', 'inputs', 'outputs'),
  # Outputs of whole tiles and cut anywhere; inputs that are no multiple.
  [(1, 576, 960), (29, 64, 1600), (3, 7, 5), (13, 130, 821), (2, 1, 16)],
)
def test_products_equal_the_portable_path(dtype, rows, inputs, outputs):
  rng = np.random.default_rng(0)
  x_BI = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.float32)
  scale = 30 if dtype == 'int8' else 1
  weight_IO = jnp.asarray(scale * rng.normal(size=(inputs, outputs))).astype(
    dtype
  )
  expected_BO = np.asarray(x_BI, float) @ np.asarray(weight_IO, float)
  found_BO = product(x_BI, weight_IO, kernel='cpu')
  np.testing.assert_allclose(found_BO, expected_BO, atol=1e-6 * scale * inputs)


@needs_compiler
def test_products_take_several_axes_scales_and_meshes():
  x_BKH, weight_KHDF = (
    normal(shape, i) for i, shape in enumerate([(2, 3, 8), (3, 8, 5, 40)])
  )
  scale_DF = jnp.arange(1.0, 201.0).reshape(1, 1, 5, 40)
  small = quantize.Quantized((20 * weight_KHDF).astype(jnp.int8), scale_DF)
  mesh = make_mesh(LLAMA, 1)
  for weight in (weight_KHDF, small):
    expected, found = (
      product(x_BKH, weight, 2, kernel) for kernel in ('jnp', 'cpu')
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    on_mesh = sharding.place((x_BKH, weight), mesh)
    again = jax.jit(functools.partial(product, summed=2, kernel='cpu'))(
      *on_mesh
    )
    np.testing.assert_array_equal(again, found)


@needs_compiler
def test_many_rows_and_other_dtypes_are_the_portable_path():
  weight_IO = normal((16, 24))
  few = normal((2, 16), 1)
  many = jnp.repeat(few, cpu.MOST_ROWS, axis=0)
  for x, weight in ((many, weight_IO), (few, weight_IO.astype(jnp.float16))):
    found = product(x, weight, kernel='cpu')
    np.testing.assert_array_equal(found, product(x, weight))


@needs_compiler
def test_a_decode_step_gives_the_same_logits():
  # int8 weights in some products, floats in others.
  params = quantize.quantize_weights(dict(make_params(LLAMA)))
  params = materialize_unembed(fuse.fuse(params))
  kv = normal(pages.pool_shape(LLAMA, 9, 4))
  state = DecodeState(
    np.array([3, 4], np.int32),
    np.array([11, 2], np.int32),
    np.array([True, True]),
    1 + np.arange(8, dtype=np.int32).reshape(2, 4),
    SamplingRows.of([Sampling()] * 2),
  )
  (expected_BV, _), (found_BV, _) = (
    jax.jit(functools.partial(decode_logits, config=LLAMA, kernel=kernel))(
      params, kv=kv, state=state
    )
    for kernel in ('jnp', 'cpu')
  )
  scale = float(jnp.abs(expected_BV).max())
  np.testing.assert_allclose(found_BV, expected_BV, atol=1e-4 * scale)


def test_without_a_compiler_there_is_the_portable_path(
  monkeypatch, tmp_path, caplog
):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(FileNotFoundError, match='no C\\+\\+ compiler'):
    build.compiled(tmp_path / 'cache')
  with caplog.at_level(logging.WARNING):
    assert not build.is_there.__wrapped__()
  assert 'no C++ compiler' in caplog.text
  monkeypatch.setattr(build, 'is_there', lambda: False)
  assert chosen('auto', CPU) == 'jnp'
  with pytest.raises(ValueError, match='needs a CPU and a C\\+\\+ compiler'):
    chosen('cpu', CPU)


@pytest.mark.parametrize(
  ('device', 'pages', 'dtype', 'kernel'),
  [
    (TPU, (64, 8, 128), 'bfloat16', 'pallas'),
    (TPU, (64, 8, 64), 'bfloat16', 'jnp'),  # half a row of its registers
    (TPU, (2048, 8, 128), 'bfloat16', 'jnp'),  # beyond VMEM
    (TPU, (64, 1, 128), 'bfloat16', 'jnp'),  # half a word
    (TPU, (64, 3, 128), 'bfloat16', 'jnp'),
    (TPU, (64, 8, 128), 'int8', 'jnp'),
    (GPU, (64, 8, 128), 'float32', 'jnp'),
  ],
)
def test_auto_is_ours_on_accelerators_where_pages_fit(
  device, pages, dtype, kernel
):
  assert chosen('auto', device, pages, dtype) == kernel
  assert chosen('pallas', device, pages, dtype) == 'pallas'
  with pytest.raises(ValueError, match='needs a CPU'):
    chosen('cpu', device, pages, dtype)


@needs_compiler
def test_a_library_is_made_once_a_source(tmp_path):
  sources = tmp_path / 'sources'
  sources.mkdir()
  (sources / 'one.cc').write_text('extern "C" int one() { return 1; }')
  made = build.compiled(tmp_path / 'cache', sources)
  assert build.compiled(tmp_path / 'cache', sources) == made
  (sources / 'one.cc').write_text('extern "C" int one() { return 2; }')
  assert build.compiled(tmp_path / 'cache', sources) != made
  (sources / 'one.cc').write_text('nonsense')
  with pytest.raises(subprocess.CalledProcessError) as error:
    build.compiled(tmp_path / 'cache', sources)
  assert 'nonsense' in error.value.stderr
  assert sorted(p.suffix for p in (tmp_path / 'cache').iterdir()) == ['.so'] * 2
