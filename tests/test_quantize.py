# SPDX-License-Identifier: Apache-2.0
"""Smaller weights and KVCache: small errors, and bytes that travel as such."""

from dataclasses import replace

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import NUM_PAGES
from engine_pieces import random_tokens
from engine_pieces import tiny_params
from engine_pieces import tiny_spec
from model_pieces import LLAMA
from model_pieces import make_params
from model_pieces import make_prompt
from model_pieces import make_table
from model_pieces import Runner
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.engine.device import DeviceBackend
from mooncake_jax.model import pages
from mooncake_jax.model import params as model_params
from mooncake_jax.model import quantize
from scripts.models import Model

LENGTH = 60
# Largest error of logits whose standard deviation is about 1.
KV_ERRORS = {'bfloat16': 0.05, 'float8_e4m3fn': 0.3, 'int8': 0.1}


def logits(params, kv_dtype='float32'):
  """Of a prompt's last token, and the pool it was computed in."""
  run = Runner(LLAMA, params=params)
  run.kv = run.kv.astype(kv_dtype)
  table_P = make_table(LENGTH, 20)
  tokens = make_prompt(LLAMA, LENGTH)
  return run.chunked(tokens, table_P, (32, LENGTH), 32), run.kv


@pytest.mark.parametrize('is_stacked', [False, True])
def test_int8_weights_change_logits_a_little(is_stacked):
  params = make_params(LLAMA)
  plain_V, _ = logits(params)
  params = model_params.stack_layers(params) if is_stacked else params
  small = quantize.quantize_weights(params)
  found_V, _ = logits(small)
  error = np.abs(found_V - plain_V).max() / plain_V.std()
  assert 0 < error < 0.1
  leaf = small['layers']['wq'] if is_stacked else small['layers'][0]['wq']
  assert leaf.values.dtype == jnp.int8
  layer = small['layers'] if is_stacked else small['layers'][1]
  wide = params['layers'] if is_stacked else params['layers'][1]
  for name, weight in wide.items():
    # No weight is off by more than half a step of its own scale.
    step = np.abs(weight).max() / 127
    found = quantize.dense_weight(layer[name])
    np.testing.assert_allclose(found, weight, atol=float(step) * 0.51)


@pytest.mark.parametrize('kv_dtype', KV_ERRORS)
def test_small_kvcache_changes_logits_a_little(kv_dtype):
  params = make_params(LLAMA)
  plain_V, kv = logits(params)
  if kv_dtype != 'bfloat16':
    params = quantize.kv_scales(params, kv, kv_dtype)
  found_V, small = logits(params, kv_dtype)
  assert small.dtype == jnp.dtype(kv_dtype)
  error = np.abs(found_V - plain_V).max() / plain_V.std()
  assert 0 < error < KV_ERRORS[kv_dtype]


def test_bfloat16_weights_are_the_float32_ones_rounded():
  """And change logits by what rounding each activation to 8 bits can."""
  plain = Model(config=LLAMA).load_params()
  small = Model(config=LLAMA, weights='bfloat16').load_params()
  rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), plain)
  jax.tree.map(np.testing.assert_array_equal, small, rounded)
  plain_V, _ = logits(params := make_params(LLAMA))
  found_V, _ = logits(jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
  assert found_V.dtype == np.float32  # whoever draws of them
  error = np.abs(found_V - plain_V).max() / plain_V.std()
  assert 0 < error < 0.1


@pytest.mark.parametrize(
  ('kv_dtype', 'weights'),
  [('bfloat16', 'float32'), ('bfloat16', 'bfloat16'), ('int8', 'float32')],
)
def test_the_engine_serves_small_kvcache_through_its_store(kv_dtype, weights):
  itemsize = jnp.dtype(kv_dtype).itemsize
  layout = replace(
    LAYOUT, token_layer_bytes=LAYOUT.token_layer_bytes // 4 * itemsize
  )
  plain = jax.tree.map(lambda a: a.astype(weights), tiny_params())
  source = with_scales if kv_dtype == 'int8' else plain
  specs = [tiny_spec(name) for name in 'ab']
  tokens, whole = random_tokens(24, 3), tuple(range(1, 9))
  with DeviceBackend(
    MODEL, layout, specs, source, kv_dtype=kv_dtype
  ) as backend:
    desk = Desk(backend)
    first = desk.prefill('a', tokens, whole)
    expected = desk.decode('a', first, 24, whole, 6)
    # Two blocks to the store, and from there to another instance.
    for block, at in enumerate((0, 2)):
      there = DevicePages('b', tuple(range(41 + at, 43 + at)))
      for ends in (
        (DevicePages('a', whole[at : at + 2]), Replica('a', block)),
        (Replica('a', block), there),
      ):
        ops = ops_of(layout, *ends)
        assert desk.transfer(*ops).status == 'completed'
    parts = backend.instances['a'].segment.read(0, 0, MODEL.num_layers)
    assert {s.dtype for p in parts for s in p.slices} == {jnp.dtype(kv_dtype)}
    again = desk.prefill('b', tokens, range(41, 49), start=16)
    assert again == first
    assert desk.decode('b', again, 24, range(41, 49), 6) == expected


def ops_of(layout: KVLayout, src, dst) -> list[TransferOp]:
  return [
    TransferOp(src, dst, *layers, layout.part_bytes(2, layers))
    for layers in layout.layer_ranges
  ]


def with_scales(mesh):
  """Loads the tiny model onto a mesh, with scales that hold its KVCache."""
  shardings = model_params.param_shardings(MODEL, mesh)
  params = jax.device_put(tiny_params(), shardings)
  kv = pages.init_pool(MODEL, NUM_PAGES, LAYOUT.page_tokens, mesh=mesh)
  return quantize.kv_scales(params, kv + 2, 'int8')
