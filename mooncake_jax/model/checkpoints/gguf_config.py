# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face `config.json` that a GGUF file's metadata amounts to."""

import math
from typing import Any

import numpy as np

from mooncake_jax.model.checkpoints.gguf_file import GGUFFile
from mooncake_jax.model.checkpoints.gguf_file import head_dim

_CLASSES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
  """The file's `config.json` as a dict.

  A Mistral model says `llama` in GGUF and is one: the arithmetic is the same.

  Raises:
    ValueError: an architecture or rope scaling that is not computed here, or a
      field that is missing; names the file, the field and the value.
  """
  arch = file.architecture
  if arch not in _CLASSES:
    raise ValueError(
      f'{file.path}: general.architecture={arch!r} is none of {list(_CLASSES)}'
    )
  heads = int(file.require('{arch}.attention.head_count'))
  biased = 'model.layers.0.self_attn.q_proj.bias' in set(file.names())
  return {
    'architectures': [_CLASSES[arch]],
    'model_type': arch,
    'vocab_size': file.shape('model.embed_tokens.weight')[0],
    'hidden_size': int(file.require('{arch}.embedding_length')),
    'intermediate_size': int(file.require('{arch}.feed_forward_length')),
    'num_hidden_layers': int(file.require('{arch}.block_count')),
    'num_attention_heads': heads,
    'num_key_value_heads': int(
      file.get('{arch}.attention.head_count_kv', heads)
    ),
    'head_dim': head_dim(file),
    'hidden_act': 'silu',
    'attention_bias': biased and arch != 'qwen2',
    'max_position_embeddings': int(file.require('{arch}.context_length')),
    'rms_norm_eps': _decimal(
      file.require('{arch}.attention.layer_norm_rms_epsilon')
    ),
    'rope_theta': _decimal(file.get('{arch}.rope.freq_base', 10000.0)),
    'rope_scaling': _rope_scaling(file),
    'tie_word_embeddings': 'lm_head.weight' not in set(file.names()),
    'bos_token_id': file.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': _one_or_all(eos_token_ids(file)),
    'pad_token_id': file.get('tokenizer.ggml.padding_token_id'),
    'torch_dtype': 'float32',
  }


def eos_token_ids(file: GGUFFile) -> list[int]:
  """Ids that end an answer: end of text and end of turn, without repeats."""
  keys = ('tokenizer.ggml.eos_token_id', 'tokenizer.ggml.eot_token_id')
  ids = [file.get(key) for key in keys]
  return list(dict.fromkeys(int(i) for i in ids if i is not None))


def _one_or_all(ids: list[int]) -> int | list[int] | None:
  return ids[0] if len(ids) == 1 else ids or None


def _decimal(value: float) -> float:
  """The short decimal that a float32 was written from: 1e-05, not 9.99e-06."""
  return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
  kind = file.get('{arch}.rope.scaling.type', 'none')
  if file.rope_factors is not None:
    return _llama3(file, file.rope_factors)
  if kind == 'none':
    return None
  if kind != 'linear':
    raise ValueError(
      f'{file.path}: {file.architecture}.rope.scaling.type={kind!r} is none of'
      " ['none', 'linear']"
    )
  factor = file.require('{arch}.rope.scaling.factor')
  return {'rope_type': 'linear', 'factor': _decimal(factor)}


def _llama3(file: GGUFFile, factors_H: np.ndarray) -> dict[str, Any]:
  """Llama 3.1's parameters, which the file keeps only as their effect.

  All published models use the wavelength bounds below; recomputing the stored
  factors from them proves that this one does too.
  """
  scaling = {
    'rope_type': 'llama3',
    'factor': float(factors_H.max()),
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  }
  theta = _decimal(file.get('{arch}.rope.freq_base', 10000.0))
  expected_H = llama3_factors(head_dim(file), theta, scaling)
  if not np.allclose(factors_H, expected_H, rtol=1e-4):
    raise ValueError(
      f'{file.path}: rope_freqs.weight={factors_H.tolist()} are not the '
      'llama3 factors of 8192 tokens'
    )
  return scaling


def llama3_factors(
  size: int, theta: float, scaling: dict[str, Any]
) -> np.ndarray:
  """Divisors [H / 2] of the rotary frequencies of a head of `size`.

  1 for wavelengths under original / high_freq_factor, `factor` over original /
  low_freq_factor, and in between a frequency interpolated between the two.
  """
  frequency_H = theta ** (-np.arange(0, size, 2) / size)
  turns_H = scaling['original_max_position_embeddings'] * frequency_H
  turns_H = turns_H / (2 * math.pi)
  low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
  smooth_H = np.clip((turns_H - low) / (high - low), 0, 1)
  return 1 / ((1 - smooth_H) / scaling['factor'] + smooth_H)
