# SPDX-License-Identifier: Apache-2.0
"""GGUF files against the Hugging Face folders they were written from."""

from pathlib import Path

import gguf
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from mooncake_jax.model.checkpoints import gguf_config
from mooncake_jax.model.checkpoints.gguf import load_gguf
from mooncake_jax.model.checkpoints.gguf_file import GGUFFile
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.sharding import make_mesh
from mooncake_jax.model_config import ModelConfig
from tests.trees import same
from tests.write_gguf import write_gguf

DATA = Path(__file__).parent / 'data'
SAME_IN_GGUF = ['llama2', 'llama_9_3', 'qwen2', 'qwen3']


@pytest.fixture
def path(tmp_path) -> Path:
  return tmp_path / 'model.gguf'


def refused(path: Path, *words: str) -> None:
  with pytest.raises(ValueError) as raised:
    load_gguf(path)
  text = str(raised.value)
  assert '\n' not in text, text
  assert all(word in text for word in (str(path), *words)), text


@pytest.mark.parametrize('name', SAME_IN_GGUF)
def test_gguf_gives_the_same_config_and_parameters(name, path):
  config, params = load_model(DATA / name)
  write_gguf(DATA / name, path)
  found, loaded = load_model(path)
  assert found == config
  assert same(loaded, params)


def test_mistral_without_its_window_is_a_llama(path):
  config, params = load_model(DATA / 'mistral')
  found, loaded = load_gguf(write_gguf(DATA / 'mistral', path))
  assert found.family == 'llama'
  assert found.sliding_window is None
  assert found.num_params == config.num_params
  assert same(loaded, params)


@pytest.mark.parametrize(('name', 'tensor'), [('llama_9_3', 3), ('qwen3', 4)])
def test_a_mesh_gets_the_same_parameters(name, tensor, path):
  config, params = load_model(DATA / name, dtype=jnp.bfloat16)
  mesh = make_mesh(jax.devices()[:tensor], config)
  write_gguf(DATA / name, path)
  assert same(load_gguf(path, mesh, jnp.bfloat16)[1], params)


@pytest.mark.parametrize(('kind', 'bits'), [('Q8_0', 7), ('Q4_1', 4)])
def test_quantised_blocks_are_decoded(kind, bits, path):
  kind = gguf.GGMLQuantizationType[kind]
  _, params = load_model(DATA / 'llama2')
  _, loaded = load_gguf(write_gguf(DATA / 'llama2', path, kind))
  for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params)):
    span = float(b.max() - b.min())
    assert float(jnp.abs(a - b).max()) <= 0.6 * span / 2**bits
  assert not same(loaded, params)


def test_linear_rope_scaling_is_read(path):
  write_gguf(
    DATA / 'llama_linear', path, scaling_type='linear', scaling_factor=4
  )
  found, _ = load_gguf(path)
  assert found == ModelConfig.from_hf(DATA / 'llama_linear')


def test_llama3_rope_scaling_is_recovered_from_its_factors(path):
  scaling = {
    'rope_type': 'llama3',
    'factor': 32.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  }
  factors = gguf_config.llama3_factors(16, 10000.0, scaling)
  factors = factors.astype(np.float32)
  write_gguf(DATA / 'llama3', path, rope_freqs=factors)
  assert gguf_config.hf_config(GGUFFile(path))['rope_scaling'] == scaling
  factors[len(factors) // 2] *= 1.5
  write_gguf(DATA / 'llama3', path, rope_freqs=factors)
  refused(path, 'rope_freqs.weight', '8192')


def test_other_rope_scalings_are_refused(path):
  write_gguf(DATA / 'llama2', path, scaling_type='yarn', scaling_factor=4)
  refused(path, 'llama.rope.scaling.type', "'yarn'")


def test_another_architecture_is_refused(path):
  write_gguf(DATA / 'llama2', path, arch='falcon')
  refused(path, 'falcon')


@pytest.mark.parametrize('field', ['block_count', 'context_length'])
def test_a_missing_field_is_named(field, path):
  refused(write_gguf(DATA / 'llama2', path, leave_out=field), f'llama.{field}')


def test_a_missing_tensor_is_named(path):
  write_gguf(DATA / 'llama2', path, leave_out='blk.1.ffn_up.weight')
  refused(path, 'model.layers.1.mlp.up_proj.weight', 'missing')


def test_truncated_files_are_named(path):
  whole = write_gguf(DATA / 'llama2', path).read_bytes()
  for size in (4, 20, 100, 5000, len(whole) // 2, len(whole) - 64):
    path.write_bytes(whole[:size])
    refused(path)


def test_files_of_another_kind_are_named(path):
  path.write_bytes(b'')
  refused(path, 'magic')
  path.write_bytes(b'PK\x03\x04 a zip file')
  refused(path, 'magic')
  with pytest.raises(FileNotFoundError, match='no such GGUF file'):
    load_gguf(path.with_name('absent.gguf'))


def test_rows_are_read_without_the_rest(path):
  file = GGUFFile(write_gguf(DATA / 'llama_9_3', path))
  name = 'model.layers.0.self_attn.q_proj.weight'
  whole = file.read(name, (slice(0, 72), slice(0, 72)))
  part = file.read(name, (slice(8, 24), slice(3, 7)))
  assert np.array_equal(part, whole[8:24, 3:7])


def test_a_damaged_count_costs_neither_memory_nor_time(path):
  whole = write_gguf(DATA / 'llama2', path).read_bytes()
  key = b'tokenizer.ggml.token_type'
  at = whole.index(key) + len(key) + 8  # the array's length, uint64
  path.write_bytes(whole[:at] + b'\xff' * 7 + b'\x00' + whole[at + 8 :])
  refused(path, 'damaged or truncated')
  key = b'llama.block_count'
  at = whole.index(key) + len(key) + 4  # uint32
  path.write_bytes(whole[:at] + b'\xff' * 4 + whole[at + 4 :])
  refused(path, 'num_layers=4294967295')
