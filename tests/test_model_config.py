# SPDX-License-Identifier: Apache-2.0
"""`config.json` in and out, and what is refused."""

import json

import pytest

from model_pieces import CONFIGS
from mooncake_jax.model_config import ModelConfig

LLAMA = {
  'model_type': 'llama',
  'vocab_size': 49152,
  'hidden_size': 576,
  'intermediate_size': 1536,
  'num_hidden_layers': 30,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'max_position_embeddings': 8192,
  'rope_theta': 100000,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
ROPE = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


@pytest.mark.parametrize('name', CONFIGS)
def test_what_is_written_reads_back(name, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIGS[name].to_hf()))
  assert ModelConfig.from_hf(tmp_path) == CONFIGS[name]


def test_sizes_of_smollm2():
  config = ModelConfig.from_hf(LLAMA)
  assert config.head_dim == 64
  assert config.num_groups == 3
  assert config.num_params == 134_515_008
  assert config.eos_token_ids == (2,)


def test_both_forms_of_rope_are_read():
  old = {**LLAMA, 'rope_scaling': ROPE}
  new = {k: v for k, v in LLAMA.items() if k != 'rope_theta'}
  new['rope_parameters'] = {**ROPE, 'rope_theta': 100000}
  assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
  plain = {**LLAMA, 'rope_parameters': {'rope_type': 'default'}}
  assert ModelConfig.from_hf(plain) == ModelConfig.from_hf(LLAMA)


def test_several_end_tokens():
  config = ModelConfig.from_hf({**LLAMA, 'eos_token_id': [2, 7]})
  assert config.eos_token_ids == (2, 7)


def test_a_window_that_is_off_or_never_binds_is_none():
  qwen = {**LLAMA, 'model_type': 'qwen2', 'sliding_window': 4096}
  assert ModelConfig.from_hf(qwen).sliding_window is None
  late = {**qwen, 'use_sliding_window': True, 'max_window_layers': 30}
  assert ModelConfig.from_hf(late).sliding_window is None
  all_layers = {**qwen, 'use_sliding_window': True, 'max_window_layers': 0}
  assert ModelConfig.from_hf(all_layers).sliding_window == 4096
  mistral = {**LLAMA, 'model_type': 'mistral', 'sliding_window': None}
  assert ModelConfig.from_hf(mistral).sliding_window is None
  wide = {**mistral, 'sliding_window': 8192}
  assert ModelConfig.from_hf(wide).sliding_window is None
  assert ModelConfig.from_hf(wide | {'sliding_window': 64}).sliding_window == 64


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'model_type': 'gpt2'}, ["model_type='gpt2'"]),
    ({'vocab_size': None}, ['vocab_size=None']),
    ({'hidden_size': '576'}, ["hidden_size='576'"]),
    ({'num_hidden_layers': 0}, ['num_hidden_layers=0']),
    ({'num_key_value_heads': 2}, ['num_heads=9', 'num_kv_heads=2']),
    ({'head_dim': 63}, ['head_dim=63']),
    ({'hidden_act': 'gelu'}, ["hidden_act='gelu'"]),
    ({'mlp_bias': True}, ['mlp_bias=True']),
    ({'attention_bias': True}, ['attention_bias=True']),
    ({'rope_scaling': {'type': 'yarn'}}, ['rope_scaling', "type='yarn'"]),
    ({'rope_scaling': {'type': 'linear'}}, ['factor=None']),
    ({'rope_scaling': 'linear'}, ["rope_scaling='linear'"]),
    (
      {
        'model_type': 'qwen2',
        'use_sliding_window': True,
        'sliding_window': 64,
        'max_window_layers': 28,
      },
      ['sliding_window=64', '28 layers'],
    ),
  ],
)
def test_errors_name_file_field_and_value(change, words, tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({**LLAMA, **change}))
  with pytest.raises(ValueError) as error:
    ModelConfig.from_hf(path)
  message = str(error.value)
  assert '\n' not in message
  for word in [str(path), *words]:
    assert word in message


def test_files_that_are_not_there_or_not_json(tmp_path):
  with pytest.raises(ValueError, match=r'config\.json'):
    ModelConfig.from_hf(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": ')
  with pytest.raises(ValueError, match='not JSON'):
    ModelConfig.from_hf(tmp_path)
  (tmp_path / 'config.json').write_text('[]')
  with pytest.raises(ValueError, match='must be an object'):
    ModelConfig.from_hf(tmp_path)


def test_flops_add_up_over_chunks():
  config = CONFIGS['window']
  unembed = 2 * config.vocab_size * config.model_dim
  whole = config.prefill_flops(0, 100) - unembed
  parts = [(0, 13), (13, 50), (50, 100)]
  assert whole == sum(config.prefill_flops(*p) - unembed for p in parts)
  # Later tokens see more keys, up to the window.
  llama = CONFIGS['llama']
  assert llama.prefill_flops(64, 128) > llama.prefill_flops(0, 64)
  assert config.prefill_flops(64, 96) == config.prefill_flops(96, 128)
