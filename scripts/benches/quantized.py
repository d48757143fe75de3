# SPDX-License-Identifier: Apache-2.0
"""What smaller weights and KVCache cost in a real model's predictions.

SmolLM2-135M in float32 reads this repository's architecture page; each variant
reads the same, and its logits and perplexity are compared. Scales of KVCache
are those of the engine, of another text (`scripts/kv_scales.py`).
"""

import math

import jax
import numpy as np

from mooncake_jax.model import params as model_params
from mooncake_jax.model import quantize
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.params import Params
from mooncake_jax.model.tokenizer import Tokenizer
from scripts.benches.rows import Row
from scripts.gin_source import ROOT
from scripts.kv_scales import logits
from scripts.models import SCALES_TEXT

FOLDER = ROOT / 'models/smollm2-135m'
# (weights, KVCache) -> the largest rise of perplexity that is asked for.
VARIANTS = {
  ('float32', 'bfloat16'): 1.01,
  ('float32', 'int8'): 1.02,
  ('float32', 'float8_e4m3fn'): 1.05,
  ('int8', 'float32'): 1.03,
  ('int8', 'int8'): 1.05,
}


def quantized(quick: bool) -> list[Row]:
  """Perplexity against float32's, and the largest difference of logits."""
  if not FOLDER.exists():
    return [Row('quantized', None, 'ratio', 'no SmolLM2 here: make model')]
  config, params = load_model(FOLDER)
  params = model_params.stack_layers(params)
  read = Tokenizer.from_folder(FOLDER).encode
  length = 256 if quick else 512
  tokens_T = np.array(read((ROOT / 'docs/architecture.md').read_text()))
  other_T = np.array(read((ROOT / SCALES_TEXT).read_text()))
  _, kv = logits(params, config, other_T[:length], 'float32')
  exact_TV, _ = logits(params, config, tokens_T[:length], 'float32')
  exact = perplexity(exact_TV, tokens_T[:length])
  rows = [Row('quantized.float32.perplexity', exact, '', f'{length} tokens')]
  for (weights, kv_dtype), most in VARIANTS.items():
    small = variant(params, kv, weights, kv_dtype)
    found_TV, _ = logits(small, config, tokens_T[:length], kv_dtype)
    ratio = perplexity(found_TV, tokens_T[:length]) / exact
    worst = float(np.abs(found_TV - exact_TV).max())
    name = f'quantized.{weights}_weights.{kv_dtype}_kv'
    what = "perplexity, of float32's"
    rows += [
      Row(f'{name}.perplexity', ratio, 'ratio', what, most, at_most=True),
      Row(f'{name}.max_logit_error', worst, '', 'largest of all logits'),
    ]
  return rows


def variant(
  params: Params, kv: jax.Array, weights: str, kv_dtype: str
) -> Params:
  """The parameters with the weights and the scales of a variant."""
  if weights == 'int8':
    params = quantize.quantize_weights(params)
  if kv_dtype in ('int8', 'float8_e4m3fn'):
    params = quantize.kv_scales(params, kv, kv_dtype)
  return params


def perplexity(logits_TV: np.ndarray, tokens_T: np.ndarray) -> float:
  """Of each token after the first, by the one before."""
  wide_TV = logits_TV[:-1].astype(np.float64)
  highest_T1 = wide_TV.max(-1, keepdims=True)
  total_T = np.log(np.exp(wide_TV - highest_T1).sum(-1)) + highest_T1[:, 0]
  own_T = np.take_along_axis(wide_TV, tokens_T[1:, None], -1)[:, 0]
  return math.exp(float((total_T - own_T).mean()))
