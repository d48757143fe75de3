# SPDX-License-Identifier: Apache-2.0
"""KVCache of other weights, another config or dtype has other keys."""

from dataclasses import replace
import json
import os
from typing import get_args

import pytest

from lifecycle import MODEL
from mooncake_jax.blocks.identity import kv_identity
from mooncake_jax.cluster_spec import KVDtype
from mooncake_jax.model.checkpoints import fingerprint as module
from mooncake_jax.model.checkpoints.fingerprint import fingerprint
from scripts.models import Model
from scripts.models import Weights


def test_the_identity_tells_models_and_dtypes_apart():
  names = {
    kv_identity(MODEL, 'a', 'float32'),
    kv_identity(MODEL, 'b', 'float32'),
    kv_identity(MODEL, 'a', 'bfloat16'),
    kv_identity(replace(MODEL, rope_theta=5e5), 'a', 'float32'),
  }
  assert len(names) == 4
  assert kv_identity(MODEL, 'a', 'float32') in names


def test_a_fingerprint_sees_content_names_and_sizes(tmp_path):
  folder = tmp_path / 'm'
  folder.mkdir()
  (folder / 'a.bin').write_bytes(bytes(100_000))
  first = fingerprint(folder)
  assert fingerprint(folder) == first
  (folder / 'a.bin').write_bytes(bytes(99_999) + b'x')
  assert fingerprint(folder) != first
  (folder / 'a.bin').write_bytes(bytes(100_000))
  (folder / 'b.bin').write_bytes(b'')
  assert fingerprint(folder) != first


@pytest.mark.parametrize('at', [0, 20_000, 500_001, 1_999_999])
def test_a_byte_anywhere_is_another_fingerprint(at, tmp_path):
  """Samples had missed 220 of SmolLM2's 272 matrices."""
  file = tmp_path / 'a.bin'
  whole = bytearray(2_000_000)
  file.write_bytes(whole)
  first = fingerprint(file)
  whole[at] = 1
  file.write_bytes(whole)
  assert fingerprint(file) != first


def test_a_settled_file_is_read_once_and_an_edited_one_again(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(module, 'SETTLED_S', -1.0)  # as if it were older
  file = tmp_path / 'a.bin'
  file.write_bytes(bytes(1000))
  first, changed_ns = fingerprint(file), file.stat().st_mtime_ns
  (kept,) = (tmp_path / 'cache').rglob('*.json')
  state, _ = json.loads(kept.read_text())
  kept.write_text(json.dumps([state, 'kept']))
  assert fingerprint(file) != first  # what was kept is what is told
  file.write_bytes(bytes(999) + b'x')
  os.utime(file, ns=(changed_ns, changed_ns))  # same size, same time
  edited = fingerprint(file)
  kept.unlink()
  assert fingerprint(file) == edited != first


def test_a_missing_checkpoint_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere'):
    fingerprint(tmp_path / 'nowhere')


def test_smaller_weights_or_kvcache_are_another_identity():
  plain = Model(config=MODEL)
  named = {
    Model(config=MODEL, weights=weights).identity(kv_dtype)
    for weights in get_args(Weights)
    for kv_dtype in get_args(KVDtype)
  }
  assert len(named) == 12
  assert plain.identity('float32') == kv_identity(MODEL, 'random-0', 'float32')
  with pytest.raises(ValueError, match="Model.weights='int3'"):
    Model(config=MODEL, weights='int3')  # pyright: ignore
