# SPDX-License-Identifier: Apache-2.0
"""Parameters survive every format, and every damage has its one line."""

import dataclasses
import json
from pathlib import Path
import shutil
import subprocess
import sys

import jax
from jax import numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from mooncake_jax.model.checkpoints import names
from mooncake_jax.model.checkpoints import source
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.checkpoints.orbax import load_orbax
from mooncake_jax.model.checkpoints.orbax import save_orbax
from mooncake_jax.model.checkpoints.safetensors import load_safetensors
from mooncake_jax.model.checkpoints.safetensors import SafetensorsFolder
from mooncake_jax.model.checkpoints.safetensors import save_safetensors
from mooncake_jax.model.params import materialize_unembed
from mooncake_jax.model.params import stack_layers
from mooncake_jax.model.sharding import make_mesh
from mooncake_jax.model_config import ModelConfig
from tests.trees import same

DATA = Path(__file__).parent / 'data'
FAMILIES = sorted(p.parent.name for p in DATA.glob('*/golden.npz'))


def mesh(config: ModelConfig, tensor: int) -> jax.sharding.Mesh:
  return make_mesh(jax.devices()[:tensor], config)


@pytest.fixture
def folder(tmp_path) -> Path:
  """A copy of a tiny checkpoint, to be damaged."""
  return Path(shutil.copytree(DATA / 'qwen2', tmp_path / 'qwen2'))


def one_line(raised) -> str:
  text = str(raised.value)
  assert '\n' not in text, text
  return text


def test_query_head_n_is_kv_head_n_over_g_and_group_n_mod_g():
  config, params = load_model(DATA / 'qwen3')
  stored = load_file(DATA / 'qwen3' / 'model.safetensors')
  layer, H, D = params['layers'][1], config.head_dim, config.model_dim
  prefix = 'model.layers.1.self_attn.'
  q = stored[prefix + 'q_proj.weight'].reshape(8, H, D)
  o = stored[prefix + 'o_proj.weight'].reshape(D, 8, H)
  for n in range(8):
    k, g = divmod(n, config.num_groups)
    assert np.array_equal(layer['wq'][:, k, g], q[n].T)
    assert np.array_equal(layer['wo'][k, g], o[:, n].T)


@pytest.mark.parametrize('name', FAMILIES)
def test_what_is_saved_is_what_was_loaded(name, tmp_path):
  config, params = load_model(DATA / name)
  save_safetensors(tmp_path, params, config)
  assert ModelConfig.from_hf(tmp_path) == config
  before = load_file(DATA / name / 'model.safetensors')
  after = load_file(tmp_path / 'model.safetensors')
  assert before.keys() == after.keys()
  assert all(np.array_equal(before[key], after[key]) for key in before)


def test_stacked_tied_and_sharded_parameters_are_saved_alike(tmp_path):
  config, params = load_model(DATA / 'llama3', dtype=jnp.bfloat16)
  save_safetensors(tmp_path, params, config)
  expected = load_file(tmp_path / 'model.safetensors')
  assert {str(t.dtype) for t in expected.values()} == {'bfloat16'}
  sharded = load_safetensors(tmp_path, None, mesh(config, 4), jnp.bfloat16)
  assert same(sharded, params)
  for other in (stack_layers(params), materialize_unembed(params), sharded):
    save_safetensors(tmp_path / 'other', other, config)
    found = load_file(tmp_path / 'other' / 'model.safetensors')
    assert same(found, expected)


def test_shards_with_an_index_are_one_model(folder):
  config, params = load_model(folder)
  path = folder / 'model.safetensors'
  tensors = load_file(path)
  path.unlink()
  weight_map = {name: f'{i % 3}.safetensors' for i, name in enumerate(tensors)}
  for shard in set(weight_map.values()):
    part = {n: t for n, t in tensors.items() if weight_map[n] == shard}
    save_file(part, folder / shard)
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  assert same(load_model(folder)[1], params)
  (folder / '1.safetensors').unlink()
  with pytest.raises(FileNotFoundError) as raised:
    load_safetensors(folder, config)
  assert '1.safetensors' in one_line(raised)


class Counting(SafetensorsFolder):
  """Counts what is read of each tensor."""

  def __init__(self, folder):
    super().__init__(folder)
    self.numbers: dict[str, int] = {}

  def read(self, name, index):
    part = super().read(name, index)
    self.numbers[name] = self.numbers.get(name, 0) + part.size
    return part


@pytest.mark.parametrize(
  ('name', 'tensor'), [('qwen2', 2), ('qwen2', 4), ('qwen3', 4), ('llama3', 8)]
)
def test_each_device_reads_its_slice_only(name, tensor):
  config, params = load_model(DATA / name)
  counting = Counting(DATA / name)
  assert same(source.load(counting, config, mesh(config, tensor)), params)
  kv_copies = tensor // min(tensor, config.num_kv_heads)
  for stored in names.all_stored(config):
    copies = kv_copies if '.k_proj' in stored.name else 1
    copies = kv_copies if '.v_proj' in stored.name else copies
    size = int(np.prod(stored.shape))
    assert counting.numbers[stored.name] == copies * size, stored.name


def test_contiguous_ranges_of_a_merged_dimension():
  ranges = lambda *s: list(source.contiguous((2, 4, 8), list(s)))  # noqa: E731
  whole = slice(0, 8, 1)
  assert ranges(slice(0, 2, 1), slice(0, 4, 1), whole) == [(0, 64)]
  assert ranges(slice(1, 2, 1), slice(0, 4, 1), whole) == [(32, 64)]
  assert ranges(slice(0, 2, 1), slice(0, 2, 1), whole) == [(0, 16), (32, 48)]


@pytest.mark.parametrize('name', ['qwen3', 'llama3'])
def test_orbax_restores_onto_another_mesh(name, tmp_path):
  config, params = load_model(DATA / name)
  on_one = load_safetensors(DATA / name, config, mesh(config, 1))
  save_orbax(tmp_path, stack_layers(on_one), config)
  assert same(load_model(tmp_path)[1], params)
  for tensor in (2, 4):
    restored = load_orbax(tmp_path, None, mesh(config, tensor))
    assert same(restored, params)
    assert len(restored['layers'][0]['wq'].sharding.device_set) == tensor
  save_orbax(tmp_path, restored, config)  # back from four devices
  assert same(load_orbax(tmp_path, config), params)
  half = load_orbax(tmp_path, config, None, jnp.bfloat16)
  assert same(half, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))


def test_orbax_names_the_parameter_that_does_not_fit(tmp_path):
  config, params = load_model(DATA / 'qwen3')
  save_orbax(tmp_path, params, config)
  with pytest.raises(ValueError, match=r'layers.0.w_down.*\(64, 64\).*\(32,'):
    load_orbax(tmp_path, dataclasses.replace(config, mlp_dim=32))
  with pytest.raises(ValueError, match='layers.2.attn_norm.*None'):
    load_orbax(tmp_path, dataclasses.replace(config, num_layers=3))
  shutil.rmtree(tmp_path / 'params')
  with pytest.raises(FileNotFoundError, match='no such orbax checkpoint'):
    load_orbax(tmp_path)


def test_a_damaged_orbax_checkpoint_is_named(tmp_path):
  config, params = load_model(DATA / 'qwen3')
  save_orbax(tmp_path, params, config)
  files = [path for path in tmp_path.rglob('d/*') if path.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:1000])
  # In a process of its own: the library leaves broken coroutines behind.
  code = (
    'from mooncake_jax.model.checkpoints.orbax import load_orbax\n'
    f'try: load_orbax({str(tmp_path)!r})\n'
    'except ValueError as error: print(error)'
  )
  run = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=120
  )
  (line,) = run.stdout.splitlines()
  assert 'damaged orbax' in line and str(tmp_path) in line, run.stderr


def test_an_empty_folder_says_what_was_looked_for(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'model\.safetensors') as raised:
    load_model(tmp_path)
  assert str(tmp_path) in one_line(raised)
  with pytest.raises(FileNotFoundError, match='no such weights file'):
    load_safetensors(tmp_path, load_model(DATA / 'qwen2')[0])


def test_truncated_safetensors_are_named(folder):
  path = folder / 'model.safetensors'
  whole = path.read_bytes()
  for size in (0, 5, 100, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='damaged or truncated') as raised:
      load_model(folder)
    assert str(path) in one_line(raised)


def test_corrupt_safetensors_headers_are_named(folder):
  path = folder / 'model.safetensors'
  whole = path.read_bytes()
  damaged = (b'\xff' * 8 + whole[8:], whole[:8] + b'[' + whole[9:])
  for content in (*damaged, whole.replace(b'"F32"', b'"F99"', 1)):
    path.write_bytes(content)
    with pytest.raises(ValueError, match='damaged or truncated') as raised:
      load_model(folder)
    assert str(path) in one_line(raised)


Q_PROJ = 'model.layers.1.self_attn.q_proj.weight'


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    (lambda t: t.pop(Q_PROJ), [Q_PROJ, 'missing']),
    (lambda t: t.update({Q_PROJ: t[Q_PROJ][1:]}), [Q_PROJ, '63, 64', '64, 64']),
    (lambda t: t.update(odd=np.zeros(1)), ["'odd'", 'no parameter', 'qwen2']),
  ],
  ids=['missing', 'another shape', 'unknown'],
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, words):
  path = folder / 'model.safetensors'
  tensors = load_file(path)
  change(tensors)
  save_file(tensors, path)
  with pytest.raises(ValueError) as raised:
    load_model(folder)
  text = one_line(raised)
  assert all(word in text for word in [str(path), *words]), text


def test_tensors_that_follow_from_others_are_ignored(folder):
  _, params = load_model(folder)
  path = folder / 'model.safetensors'
  tensors = load_file(path)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']  # tied
  tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(4)
  save_file(tensors, path)
  assert same(load_model(folder)[1], params)


def test_a_damaged_index_is_named(folder):
  (folder / 'model.safetensors').unlink()
  index = folder / 'model.safetensors.index.json'
  for content in ('{', '{}', '[]'):
    index.write_text(content)
    with pytest.raises(ValueError, match='no weight_map') as raised:
      load_model(folder)
    assert str(index) in one_line(raised)
