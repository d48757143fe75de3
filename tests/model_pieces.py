# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family, a plain reference, and a cache to run them on.

The reference is float64 numpy, one token and one head at a time: nothing in
it is paged, blocked or batched.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.model import decode
from mooncake_jax.model import pages as kv_pool
from mooncake_jax.model import params as model_params
from mooncake_jax.model import prefill
from mooncake_jax.model import rope
from mooncake_jax.model import sharding
from mooncake_jax.model.params import Params
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model_config import ModelConfig
from mooncake_jax.model_config import RopeScaling
from mooncake_jax.request import Sampling

PAGE_TOKENS = 4
LLAMA = ModelConfig(
  'llama',
  vocab_size=96,
  model_dim=32,
  mlp_dim=48,
  num_layers=2,
  num_heads=8,
  num_kv_heads=4,
  head_dim=8,
  max_tokens=512,
)
LLAMA3_ROPE = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_tokens=32)
CONFIGS = {
  'llama': LLAMA,
  'llama3': replace(
    LLAMA, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, num_kv_heads=2
  ),
  'linear': replace(LLAMA, rope_scaling=RopeScaling('linear', 4.0)),
  'qwen2': replace(LLAMA, family='qwen2', qkv_bias=True, tie_embeddings=True),
  'qwen3': replace(LLAMA, family='qwen3', qk_norm=True, head_dim=12),
  'mistral': replace(LLAMA, family='mistral', num_kv_heads=8),
  'window': replace(LLAMA, family='mistral', sliding_window=21),
  'smollm2': replace(
    LLAMA, num_heads=9, num_kv_heads=3, mlp_dim=54, tie_embeddings=True
  ),
}
GREEDY = SamplingRows.of([Sampling()])


@functools.cache
def make_params(config: ModelConfig, tensor: int = 1) -> Params:
  """Random weights far from their initial values, biases and norms too."""
  tree = model_params.abstract_params(config)
  leaves, treedef = jax.tree.flatten(tree)
  rng = np.random.default_rng(0)
  values = [rng.normal(0, 0.2, leaf.shape) for leaf in leaves]
  tree = jax.tree.unflatten(treedef, [v.astype(np.float32) for v in values])
  mesh = make_mesh(config, tensor)
  return jax.device_put(tree, model_params.param_shardings(config, mesh))


def make_mesh(config: ModelConfig, tensor: int = 1) -> jax.sharding.Mesh:
  return sharding.make_mesh(jax.devices()[:tensor], config)


def normal(shape: Sequence[int], seed: int = 0) -> jax.Array:
  """Drawn on the host: JAX compiles seconds for a shape of many axes."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape, np.float32))


def make_prompt(config: ModelConfig, length: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, config.vocab_size, length, dtype=np.int32)


def make_table(num_tokens: int, size: int, seed: int = 0) -> np.ndarray:
  """Scattered pages for `num_tokens`, then scratch up to `size` pages."""
  rng = np.random.default_rng(seed)
  table_P = np.zeros(size, np.int32)
  used = -(-num_tokens // PAGE_TOKENS)
  table_P[:used] = 1 + rng.permutation(size)[:used]
  return table_P


class Runner:
  """A model and its pool; computes chunks in place."""

  def __init__(
    self,
    config: ModelConfig,
    tensor: int = 1,
    num_pages: int = 80,
    params: Params | None = None,
  ):
    self.config = config
    self.mesh = make_mesh(config, tensor)
    self.params = make_params(config, tensor) if params is None else params
    self.kv = kv_pool.init_pool(config, num_pages, PAGE_TOKENS, mesh=self.mesh)

  def prefill(self, tokens, table_P, start: int, stop: int, bucket: int):
    """Computes tokens [start, stop); returns the last one's logits [V]."""
    tokens_T = np.zeros(bucket, np.int32)
    tokens_T[: stop - start] = tokens[start:stop]
    length = np.int32(stop - start)
    report_R, logits_V, self.kv = prefill.prefill_chunk(
      self.params,
      self.config,
      self.kv,
      tokens_T,
      table_P,
      np.int32(start),
      length,
      GREEDY,
    )
    assert int(report_R[0]) == int(jnp.argmax(logits_V))
    return np.asarray(logits_V)

  def chunked(self, tokens, table_P, cuts: Iterable[int], bucket: int):
    """Computes chunks that end at `cuts`; returns the last one's logits."""
    start, logits_V = 0, np.zeros(0)
    for stop in cuts:
      logits_V = self.prefill(tokens, table_P, start, stop, bucket)
      start = stop
    return logits_V

  def decode_logits(self, rows: dict[str, Any]):
    """Logits [B, V] of a step whose rows are given as `DecodeState` fields."""
    num_rows = len(rows['tokens_B'])
    state = decode.DecodeState(
      **rows, sampling=SamplingRows.of([Sampling()] * num_rows)
    )
    logits_BV, self.kv = _decode_logits(
      self.params, self.config, self.kv, state
    )
    return np.asarray(logits_BV)


_decode_logits = jax.jit(
  decode.decode_logits, static_argnames='config', donate_argnames='kv'
)


def reference_logits(config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
  """Float64 logits [T, V] of all tokens."""
  tree = jax.tree.map(lambda a: np.asarray(a, np.float64), make_params(config))
  x_TD = tree['embed'][tokens]
  for layer in tree['layers']:
    x_TD = x_TD + _attention(config, layer, x_TD)
    h_TD = _norm(x_TD, layer['mlp_norm'], config.norm_eps)
    gate_TF = h_TD @ layer['w_gate']
    gate_TF = gate_TF / (1 + np.exp(-gate_TF))
    x_TD = x_TD + (gate_TF * (h_TD @ layer['w_up'])) @ layer['w_down']
  h_TD = _norm(x_TD, tree['final_norm'], config.norm_eps)
  return h_TD @ (tree['unembed'] if 'unembed' in tree else tree['embed'].T)


def _norm(x, weight, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _turn(config: ModelConfig, x_TH: np.ndarray) -> np.ndarray:
  """RoPE as a rotation of complex numbers."""
  half = config.head_dim // 2
  frequencies = np.float64(rope.inverse_frequencies(config))
  turns = np.exp(1j * np.outer(np.arange(len(x_TH)), frequencies))
  turned = (x_TH[:, :half] + 1j * x_TH[:, half:]) * turns
  return np.concatenate([turned.real, turned.imag], axis=1)


def _attention(config, layer, x_TD):
  h_TD = _norm(x_TD, layer['attn_norm'], config.norm_eps)
  out_TD = np.zeros_like(x_TD)
  for k in range(config.num_kv_heads):
    k_SH, v_SH = h_TD @ layer['wk'][:, k], h_TD @ layer['wv'][:, k]
    if config.qkv_bias:
      k_SH, v_SH = k_SH + layer['bk'][k], v_SH + layer['bv'][k]
    if config.qk_norm:
      k_SH = _norm(k_SH, layer['k_norm'], config.norm_eps)
    for g in range(config.num_groups):
      q_TH = h_TD @ layer['wq'][:, k, g]
      q_TH = q_TH + layer['bq'][k, g] if config.qkv_bias else q_TH
      if config.qk_norm:
        q_TH = _norm(q_TH, layer['q_norm'], config.norm_eps)
      s_TS = _turn(config, q_TH) @ _turn(config, k_SH).T
      p_TS = _softmax(config, s_TS / np.sqrt(config.head_dim))
      out_TD += p_TS @ v_SH @ layer['wo'][k, g]
  return out_TD


def _softmax(config, s_TS):
  distance_TS = np.subtract.outer(*2 * (np.arange(len(s_TS)),))
  window = config.sliding_window or len(s_TS)
  seen_TS = (distance_TS >= 0) & (distance_TS < window)
  p_TS = np.where(seen_TS, np.exp(s_TS - s_TS.max(-1, keepdims=True)), 0)
  return p_TS / p_TS.sum(-1, keepdims=True)
