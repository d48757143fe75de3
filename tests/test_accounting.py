# SPDX-License-Identifier: Apache-2.0
"""Counted bytes are those the device really holds."""

import jax
from jax import numpy as jnp
import pytest

from model_pieces import LLAMA
from mooncake_jax.blocks.accounting import device_peak_bytes
from mooncake_jax.blocks.accounting import kv_bytes
from mooncake_jax.blocks.accounting import pages_for
from mooncake_jax.blocks.accounting import weight_bytes
from mooncake_jax.model import pages
from mooncake_jax.model.sharding import make_mesh
from mooncake_jax.model_config import ModelConfig

LLAMA2_70B = ModelConfig(
  'llama',
  vocab_size=32000,
  model_dim=8192,
  mlp_dim=28672,
  num_layers=80,
  num_heads=64,
  num_kv_heads=8,
  head_dim=128,
  max_tokens=4096,
)


def test_the_kvcache_of_the_papers_model():
  # LLaMA2-70B: 2 * 80 * 8 * 128 * 2 bytes = 320 KiB a token.
  assert kv_bytes(LLAMA2_70B, 1, 2) == 320 * 1024
  assert kv_bytes(LLAMA2_70B, 512, 2) == 512 * kv_bytes(LLAMA2_70B, 1, 2)
  assert kv_bytes(LLAMA2_70B, 0, 2) == 0


def test_the_papers_model_has_its_number_of_weights():
  assert round(LLAMA2_70B.num_params / 1e9) == 69
  assert weight_bytes(LLAMA2_70B, 2) == 2 * LLAMA2_70B.num_params


@pytest.mark.parametrize(
  ('tokens', 'expected'), [(0, 0), (1, 1), (16, 1), (17, 2), (33, 3)]
)
def test_pages_round_up(tokens, expected):
  assert pages_for(tokens, 16) == expected


@pytest.mark.parametrize('tensor', [1, 2, 4, 8])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_pool_is_as_large_as_counted(tensor, dtype):
  mesh = make_mesh(jax.devices()[:tensor], LLAMA)
  kv = pages.init_pool(LLAMA, 6, 4, dtype, mesh)
  on_device = kv.addressable_shards[0].data.nbytes
  dtype_bytes = jnp.dtype(dtype).itemsize
  weights = weight_bytes(LLAMA, dtype_bytes, tensor)
  peak = device_peak_bytes(
    LLAMA, num_pages=6, page_tokens=4, dtype_bytes=dtype_bytes, tensor=tensor
  )
  assert peak == weights + on_device


def test_a_peak_is_the_sum_of_its_parts():
  parts = {'num_pages': 10, 'page_tokens': 16, 'dtype_bytes': 2}
  bare = device_peak_bytes(LLAMA, **parts)
  more = device_peak_bytes(
    LLAMA, **parts, workspace_bytes=1000, transfer_bytes=500
  )
  assert more == bare + 1500
  wide = device_peak_bytes(LLAMA, **parts, margin=0.1)
  assert wide == pytest.approx(1.1 * bare, abs=1)


@pytest.mark.parametrize('field', ['num_pages', 'tensor'])
def test_nothing_is_refused_by_name(field):
  parts = {'num_pages': 10, 'page_tokens': 16, 'dtype_bytes': 2, field: 0}
  with pytest.raises(ValueError, match=f'{field}=0'):
    device_peak_bytes(LLAMA, **parts)
