# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of Hugging Face models, as keyword arguments.

Accepts the older form (`rope_theta`, `rope_scaling`) and the newer
(`rope_parameters`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
import json
from pathlib import Path
from typing import Any

# model_type -> (qkv_bias, qk_norm, class name in `architectures`)
_FAMILIES = {
  'llama': (False, False, 'LlamaForCausalLM'),
  'qwen2': (True, False, 'Qwen2ForCausalLM'),
  'qwen3': (False, True, 'Qwen3ForCausalLM'),
  'mistral': (False, False, 'MistralForCausalLM'),
}
_SIZES = {
  'vocab_size': 'vocab_size',
  'model_dim': 'hidden_size',
  'mlp_dim': 'intermediate_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'max_tokens': 'max_position_embeddings',
}
_LLAMA3 = {
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_max_tokens': 'original_max_position_embeddings',
}


@dataclass(frozen=True)
class Reader:
  """Fields of one file; its errors name the file, the field and the value."""

  name: str
  data: Mapping[str, Any]

  @classmethod
  def open(cls, source: str | Path | Mapping[str, Any]) -> 'Reader':
    """Reads a file, a folder with `config.json`, or wraps its content."""
    if isinstance(source, Mapping):
      return cls('config', source)
    path = Path(source)
    path = path / 'config.json' if path.is_dir() else path
    if not path.is_file():
      raise ValueError(f'{path}: no such file, a model needs its config.json')
    try:
      data = json.loads(path.read_text())
    except ValueError as error:
      raise ValueError(f'{path}: not JSON: {error}') from error
    if not isinstance(data, dict):
      raise ValueError(f'{path}: content={data!r} must be an object')
    return cls(str(path), data)

  def error(self, field: str, why: str) -> ValueError:
    return ValueError(f'{self.name}: {field}={self.data.get(field)!r} {why}')

  def sub(self, field: str) -> 'Reader':
    data = self.data.get(field)
    if not isinstance(data, Mapping):
      raise self.error(field, 'must be an object')
    return Reader(f'{self.name}: {field}', data)

  def number(self, field: str, default: Any = None) -> Any:
    """A positive int or float; `default` where absent or null."""
    value = self.data.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise self.error(field, 'must be a number')
    if not value > 0:
      raise self.error(field, 'must be > 0')
    return value

  def size(self, field: str, default: int | None = None) -> int:
    value = self.number(field, default)
    if value != int(value):
      raise self.error(field, 'must be an integer')
    return int(value)


def read_fields(reader: Reader) -> dict[str, Any]:
  """Returns `ModelConfig`'s fields but `rope_scaling`."""
  family = reader.data.get('model_type')
  if family not in _FAMILIES:
    raise reader.error('model_type', f'must be one of {sorted(_FAMILIES)}')
  _refuse_what_is_not_computed(reader)
  fields: dict[str, Any] = {
    name: reader.size(hf) for name, hf in _SIZES.items()
  }
  heads = fields['num_heads']
  fields['num_kv_heads'] = reader.size('num_key_value_heads', heads)
  fields['head_dim'] = reader.size('head_dim', fields['model_dim'] // heads)
  fields['family'] = family
  fields['qkv_bias'], fields['qk_norm'], _ = _FAMILIES[family]
  fields['rope_theta'] = _rope_theta(reader)
  fields['norm_eps'] = float(reader.number('rms_norm_eps', 1e-6))
  fields['tie_embeddings'] = bool(reader.data.get('tie_word_embeddings', False))
  fields['bos_token_id'] = reader.data.get('bos_token_id')
  fields['eos_token_ids'] = _token_ids(reader.data.get('eos_token_id'))
  fields['sliding_window'] = _sliding_window(reader, fields)
  return fields


def _refuse_what_is_not_computed(reader: Reader) -> None:
  act = reader.data.get('hidden_act', 'silu')
  if act != 'silu':
    raise reader.error('hidden_act', "must be 'silu'")
  for field in ('attention_bias', 'mlp_bias'):
    if reader.data.get(field):
      raise reader.error(field, 'is not supported')
  rope = _rope_reader(reader)
  if rope is not None and rope.data.get('partial_rotary_factor', 1) != 1:
    raise rope.error('partial_rotary_factor', 'must be 1')


def _token_ids(value: Any) -> tuple[int, ...]:
  if value is None:
    return ()
  return tuple(value) if isinstance(value, list | tuple) else (value,)


def _sliding_window(reader: Reader, fields: dict[str, Any]) -> int | None:
  """The window all layers share; None where it never binds.

  Absent fields mean what the families' own defaults say.
  """
  qwen = fields['family'].startswith('qwen')
  default = 4096 if fields['family'] == 'mistral' else None
  window = reader.data.get('sliding_window', default)
  if qwen and not reader.data.get('use_sliding_window', False):
    return None
  if fields['family'] == 'llama' or window is None:
    return None
  if window >= fields['max_tokens']:
    return None
  num_full = _num_full_layers(reader, fields['num_layers'], qwen)
  if num_full == fields['num_layers']:
    return None
  if num_full:
    raise reader.error(
      'sliding_window', f'on all but {num_full} layers is not supported'
    )
  return reader.size('sliding_window', default)


def _num_full_layers(reader: Reader, num_layers: int, qwen: bool) -> int:
  """Layers without the sliding window."""
  if not qwen:
    return 0
  kinds = reader.data.get('layer_types')
  if kinds is not None:
    return sum(kind != 'sliding_attention' for kind in kinds)
  return min(reader.data.get('max_window_layers', 28), num_layers)


def _rope_reader(reader: Reader) -> Reader | None:
  for field in ('rope_parameters', 'rope_scaling'):
    if reader.data.get(field) is not None:
      return reader.sub(field)
  return None


def _rope_theta(reader: Reader) -> float:
  rope = _rope_reader(reader)
  if rope is not None and 'rope_theta' in rope.data:
    return float(rope.number('rope_theta'))
  return float(reader.number('rope_theta', 10000.0))


def read_rope_scaling(reader: Reader) -> dict[str, Any] | None:
  """Returns `RopeScaling`'s fields, or None where RoPE is plain."""
  rope = _rope_reader(reader)
  if rope is None:
    return None
  key = 'rope_type' if 'rope_type' in rope.data else 'type'
  kind = rope.data.get(key, 'default')
  if kind == 'default':
    return None
  if kind not in ('linear', 'llama3'):
    raise rope.error(key, "must be 'default', 'linear' or 'llama3'")
  fields = {'kind': kind, 'factor': float(rope.number('factor'))}
  if kind == 'llama3':
    fields.update({ours: rope.number(hf) for ours, hf in _LLAMA3.items()})
  return fields


def write_fields(config: Any) -> dict[str, Any]:
  """Returns the `config.json` of a `ModelConfig`, in the older form."""
  eos = list(config.eos_token_ids)
  out: dict[str, Any] = {
    'architectures': [_FAMILIES[config.family][2]],
    'model_type': config.family,
    **{hf: getattr(config, name) for name, hf in _SIZES.items()},
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_dim,
    'hidden_act': 'silu',
    'rms_norm_eps': config.norm_eps,
    'rope_theta': config.rope_theta,
    'tie_word_embeddings': config.tie_embeddings,
    'bos_token_id': config.bos_token_id,
    'eos_token_id': eos[0] if len(eos) == 1 else (eos or None),
  }
  if config.sliding_window is not None:
    out['sliding_window'] = config.sliding_window
    if config.family.startswith('qwen'):
      out.update(use_sliding_window=True, max_window_layers=0)
  if config.rope_scaling is not None:
    out['rope_scaling'] = _write_rope_scaling(config.rope_scaling)
  return out


def _write_rope_scaling(scaling: Any) -> dict[str, Any]:
  out = {'rope_type': scaling.kind, 'factor': scaling.factor}
  if scaling.kind == 'llama3':
    out.update({hf: getattr(scaling, ours) for ours, hf in _LLAMA3.items()})
  return out
