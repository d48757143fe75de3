# SPDX-License-Identifier: Apache-2.0
"""Scales of a small KVCache, measured once on a text and then kept.

All instances of a model must have the same ones, in every process: they are
measured in float32 on one device, on a text that stays as it is; where tokens
mean nothing, on tokens drawn by the model's seed.
"""

import functools

import jax
from jax import numpy as jnp
import numpy as np

from mooncake_jax.cluster_spec import KVDtype
from mooncake_jax.model import forward
from mooncake_jax.model import params as model_params
from mooncake_jax.model import quantize
from mooncake_jax.model.pages import init_pool
from mooncake_jax.model.params import Params
from mooncake_jax.model_config import ModelConfig
from scripts.gin_source import ROOT
from scripts.models import Model
from scripts.models import SCALED
from scripts.models import SCALES_TEXT

PAGE_TOKENS = 64
NUM_TOKENS = 512


def measured_scales(
  model: Model, kv_dtype: KVDtype
) -> dict[str, np.ndarray] | None:
  """Scales [L, K, H] for KVCache in `kv_dtype`; None where it has none."""
  if kv_dtype not in SCALED:
    return None
  config = model.read_config()
  params = model_params.stack_layers(model.load_params())
  _, kv = logits(params, config, _tokens(model, config), 'float32')
  scales = quantize.measured_scales(kv, kv_dtype)
  return {name: np.asarray(scale) for name, scale in scales.items()}


def _tokens(model: Model, config: ModelConfig) -> np.ndarray:
  count = min(NUM_TOKENS, config.max_tokens)
  path = model.find()
  if path is None:
    draw = np.random.default_rng(model.seed)
    return draw.integers(0, config.vocab_size, count).astype(np.int32)
  from mooncake_jax.model.tokenizer import Tokenizer

  read = Tokenizer.from_folder if path.is_dir() else Tokenizer.from_gguf
  text = (ROOT / SCALES_TEXT).read_text()
  return np.array(read(path).encode(text)[:count], np.int32)


def logits(
  params: Params, config: ModelConfig, tokens_T: np.ndarray, kv_dtype: str
) -> tuple[np.ndarray, jax.Array]:
  """Of every token [T, V], and the pool they were computed in.

  Args:
    params: layers stacked.
  """
  num_pages = 1 + -(-len(tokens_T) // PAGE_TOKENS)
  kv = init_pool(config, num_pages, PAGE_TOKENS, kv_dtype)
  logits_TV, kv = _logits(params, config, tokens_T, kv)
  return np.asarray(logits_TV), kv


@functools.partial(jax.jit, static_argnames='config', donate_argnames='kv')
def _logits(params, config, tokens_T, kv):
  T = len(tokens_T)
  x_1TD, kv = forward.stage_fn(
    params['layers'],
    config,
    forward.embed(params, tokens_T[None]),
    kv,
    jnp.arange(1, kv.shape[1], dtype=jnp.int32)[None],
    jnp.zeros(1, jnp.int32),
    jnp.full(1, T, jnp.int32),
  )
  return forward.unembed(params, config, x_1TD[0]), kv
