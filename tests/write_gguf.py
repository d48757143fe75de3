# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face folder as GGUF, the way llama.cpp's tools do."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
  'model.embed_tokens.weight': 'token_embd.weight',
  'model.norm.weight': 'output_norm.weight',
  'lm_head.weight': 'output.weight',
}
LAYER_NAMES = {
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'self_attn.o_proj': 'attn_output',
  'post_attention_layernorm': 'ffn_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
FIELD_TYPES = {
  int: gguf.GGUFValueType.UINT32,
  float: gguf.GGUFValueType.FLOAT32,
  str: gguf.GGUFValueType.STRING,
}
DATA = Path(__file__).parent / 'data'
TINY_TOKENIZER = DATA / 'tiny_tokenizer'
TINY_SENTENCEPIECE = DATA / 'tiny_sentencepiece.json'


def write_gguf(
  folder: Path,
  path: Path,
  quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
  leave_out: str = '',
  **fields: Any,
) -> Path:
  """Writes `path`; returns it.

  Args:
    quantisation: of all matrices.
    leave_out: name of a GGUF tensor or field not to write.
    fields: scaling_type, scaling_factor, rope_freqs, tokenizer (model name).
  """
  config = json.loads((folder / 'config.json').read_text())
  kind = config['model_type']
  arch = {'mistral': 'llama'}.get(kind, kind)
  writer = gguf.GGUFWriter(path, fields.get('arch', arch))
  for key, value in _sizes(config, fields).items():
    if key != leave_out:
      kind = FIELD_TYPES[type(value)]
      writer.add_key_value(f'{arch}.{key}', value, kind)
  _add_tokenizer(writer, fields.get('tokenizer', 'gpt2'))
  for name, tensor in load_file(folder / 'model.safetensors').items():
    if arch == 'llama' and '.q_proj.' in name:
      tensor = permuted(tensor, config['num_attention_heads'])
    if arch == 'llama' and '.k_proj.' in name:
      tensor = permuted(tensor, config['num_key_value_heads'])
    if gguf_name(name) != leave_out:
      _add_tensor(writer, gguf_name(name), tensor, quantisation)
  if 'rope_freqs' in fields:
    writer.add_tensor('rope_freqs.weight', fields['rope_freqs'])
  for write in (
    writer.write_header_to_file,
    writer.write_kv_data_to_file,
    writer.write_tensors_to_file,
    writer.close,
  ):
    write()
  return path


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
  """Each head's halves interleaved: rows 0 1 2 3 become 0 2 1 3."""
  halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
  return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
  if name in NAMES:
    return NAMES[name]
  _, _, layer, rest = name.split('.', 3)
  module, kind = rest.rsplit('.', 1)
  return f'blk.{layer}.{LAYER_NAMES[module]}.{kind}'


def _sizes(config: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
  sizes = {
    'block_count': config['num_hidden_layers'],
    'context_length': config['max_position_embeddings'],
    'embedding_length': config['hidden_size'],
    'feed_forward_length': config['intermediate_size'],
    'attention.head_count': config['num_attention_heads'],
    'attention.head_count_kv': config['num_key_value_heads'],
    'attention.key_length': config.get('head_dim')
    or config['hidden_size'] // config['num_attention_heads'],
    'attention.layer_norm_rms_epsilon': float(config['rms_norm_eps']),
    'rope.freq_base': float(config['rope_parameters']['rope_theta']),
  }
  if 'scaling_type' in fields:
    sizes['rope.scaling.type'] = fields['scaling_type']
    sizes['rope.scaling.factor'] = float(fields['scaling_factor'])
  return sizes


def _add_tokenizer(writer: gguf.GGUFWriter, model: str) -> None:
  writer.add_tokenizer_model(model)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  if model == 'llama':
    _add_sentencepiece(writer)
  else:
    _add_byte_level(writer)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
  data = json.loads(TINY_SENTENCEPIECE.read_text())
  writer.add_token_list(data['tokens'])
  writer.add_token_types(data['types'])
  writer.add_token_scores(data['scores'])


def _add_byte_level(writer: gguf.GGUFWriter) -> None:
  data = json.loads((TINY_TOKENIZER / 'tokenizer.json').read_text())
  vocab = sorted(data['model']['vocab'].items(), key=lambda item: item[1])
  special = {token['content'] for token in data['added_tokens']}
  writer.add_tokenizer_pre('smollm')
  writer.add_token_list([token for token, _ in vocab])
  writer.add_token_types([3 if token in special else 1 for token, _ in vocab])
  writer.add_token_merges([' '.join(m) for m in data['model']['merges']])
  template = (TINY_TOKENIZER / 'chat_template.jinja').read_text()
  writer.add_chat_template(template)


def _add_tensor(
  writer: gguf.GGUFWriter,
  name: str,
  tensor: np.ndarray,
  quantisation: gguf.GGMLQuantizationType,
) -> None:
  if tensor.ndim == 1:
    quantisation = gguf.GGMLQuantizationType.F32
  data = gguf.quants.quantize(tensor, quantisation)
  writer.add_tensor(name, data, raw_dtype=quantisation)
