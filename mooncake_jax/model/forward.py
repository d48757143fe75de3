# SPDX-License-Identifier: Apache-2.0
"""A stage of layers over a batch of rows: what prefill and decode share.

B batch, T query token, L layer, K KV head, H head dim, D model, V vocab,
P page, C token in a page.
"""

import functools

import jax
from jax import numpy as jnp

from mooncake_jax.model import attention
from mooncake_jax.model import layers as parts
from mooncake_jax.model import quantize
from mooncake_jax.model import rope
from mooncake_jax.model import sharding
from mooncake_jax.model.kernels import AttentionKernel
from mooncake_jax.model.params import Layers
from mooncake_jax.model.params import Params
from mooncake_jax.model.products import can_stay_stacked
from mooncake_jax.model.products import product
from mooncake_jax.model.products import Stacked
from mooncake_jax.model_config import ModelConfig


def stage_fn(
  layers: Layers,
  config: ModelConfig,
  x_BTD: jax.Array,
  kv_LP2CKH: jax.Array,
  page_table_BP: jax.Array,
  start_B: jax.Array,
  stop_B: jax.Array,
  first_layer: int | jax.Array = 0,
  num_layers: jax.Array | None = None,
  kernel: AttentionKernel = 'jnp',
) -> tuple[jax.Array, jax.Array]:
  """Runs layers of a stage and writes their KVCache.

  Token t of row b stands at position start_B[b] + t and is valid below
  stop_B[b]; padding is written to scratch page 0 and its output is garbage.
  The KVCache of [0, start_B[b]) already lies in the row's pages.

  Args:
    layers: stacked (scan), or a tuple of single layers (unrolled) and stacks.
    kv_LP2CKH: of the whole stage.
    page_table_BP: pages in token order; entries past stop are not read.
    first_layer: where the layers' KVCache lies in the stage's.
    num_layers: run so many of a stack's layers only; None is all.
    kernel: of attention; with 'cpu' of products of few rows, too.

  Returns:
    x [B, T, D] after the layers, and the KVCache.
  """
  C = kv_LP2CKH.shape[3]
  T = x_BTD.shape[1]
  position_BT = start_B[:, None] + jnp.arange(T)[None]
  where = _slots(page_table_BP, position_BT, stop_B, C)
  angles = rope.angles(config, position_BT)

  def run(i, layer, x_BTD, kv):
    h_BTD = parts.rms_norm(x_BTD, layer['attn_norm'], config.norm_eps)
    q_BTKGH, k_BTKH, v_BTKH = parts.qkv(layer, config, h_BTD, angles, kernel)
    kv_BT2KH = jnp.stack([k_BTKH, v_BTKH], axis=2)
    kv = _write(kv, i, where, quantize.shrink(layer, kv_BT2KH, kv.dtype))
    q_BTKGH = quantize.widen_query(layer, q_BTKGH)
    rows = (page_table_BP, start_B, stop_B)
    o_BTKGH = attention.attend(
      q_BTKGH, kv, i, *rows, config.sliding_window, kernel
    )
    o_BTKGH = quantize.widen_output(layer, o_BTKGH)
    x_BTD += parts.attention_output(layer, o_BTKGH, kernel)
    h_BTD = parts.rms_norm(x_BTD, layer['mlp_norm'], config.norm_eps)
    return x_BTD + parts.mlp(layer, h_BTD, kernel), kv

  at = first_layer
  for part in (layers,) if isinstance(layers, dict) else layers:
    if part['attn_norm'].ndim == 1:
      x_BTD, kv_LP2CKH = run(at, part, x_BTD, kv_LP2CKH)
      at += 1
    else:
      carry = (x_BTD, kv_LP2CKH)
      if num_layers is None and can_stay_stacked(len(x_BTD) * T, kernel):
        x_BTD, kv_LP2CKH = _in_place(run, at, part, carry)
      else:
        x_BTD, kv_LP2CKH = _scan(run, at, part, num_layers, carry)
      at += len(part['attn_norm'])
  return x_BTD, kv_LP2CKH


def _in_place(run, first_layer, layers, carry):
  """Weights are read from the stack: none is copied out of it."""

  def step(i, carry):
    layer = {name: Stacked(leaf, i) for name, leaf in layers.items()}
    for name in set(layer) - set(parts.MATRICES):
      layer[name] = layer[name].taken()
    return run(first_layer + i, layer, *carry)

  return jax.lax.fori_loop(0, len(layers['attn_norm']), step, carry)


def _scan(run, first_layer, layers, num_layers, carry):
  """Carries the KVCache: as scan inputs and outputs it would be copied."""

  def body(carry, layer_and_index):
    layer, i = layer_and_index
    return run(i, layer, *carry), None

  def step(i, carry):
    at = functools.partial(jax.lax.dynamic_index_in_dim, index=i)
    layer = jax.tree.map(lambda a: at(a, keepdims=False), layers)
    return run(first_layer + i, layer, *carry)

  if num_layers is not None:
    return jax.lax.fori_loop(0, num_layers, step, carry)
  indices = first_layer + jnp.arange(len(layers['attn_norm']))
  carry, _ = jax.lax.scan(body, carry, (layers, indices))
  return carry


def _slots(page_table_BP, position_BT, stop_B, page_tokens):
  """Where tokens lie: page and offset [B, T]; padding in page 0."""
  num_pages = page_table_BP.shape[1]
  index_BT = jnp.minimum(position_BT // page_tokens, num_pages - 1)
  page_BT = jnp.take_along_axis(page_table_BP, index_BT, axis=1)
  valid_BT = position_BT < stop_B[:, None]
  return jnp.where(valid_BT, page_BT, 0), position_BT % page_tokens


def _write(kv, layer, where, kv_BT2KH):
  page_BT, offset_BT = where
  return kv.at[layer, page_BT, :, offset_BT].set(kv_BT2KH)


def embed(params: Params, tokens_BT: jax.Array) -> jax.Array:
  """Looks tokens up: [B, T, D]."""
  table_VD = params['embed']
  return table_VD.at[tokens_BT].get(out_sharding=sharding.replicated(table_VD))


def unembed(
  params: Params,
  config: ModelConfig,
  x_BD: jax.Array,
  kernel: AttentionKernel = 'jnp',
) -> jax.Array:
  """Returns float32 logits [B, V], whole on every device."""
  h_BD = parts.rms_norm(x_BD, params['final_norm'], config.norm_eps)
  if 'unembed' in params:
    table = params['unembed']
    logits_BV = product(h_BD, table, kernel=kernel, dtype=jnp.float32)
  else:
    table = params['embed']
    logits_BV = jnp.einsum(
      'BD,VD->BV', h_BD, table, preferred_element_type=jnp.float32
    )
  whole = sharding.replicated(table)
  return logits_BV if whole is None else jax.sharding.reshard(logits_BV, whole)
