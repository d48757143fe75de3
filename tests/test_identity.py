# SPDX-License-Identifier: Apache-2.0
"""KVCache of other weights, another config or dtype has other keys."""

from dataclasses import replace
from typing import get_args

import pytest

from lifecycle import MODEL
from mooncake_jax.blocks.identity import kv_identity
from mooncake_jax.cluster_spec import KVDtype
from mooncake_jax.model.checkpoints.fingerprint import fingerprint
from scripts.models import Model


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


def test_a_missing_checkpoint_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='nowhere'):
    fingerprint(tmp_path / 'nowhere')


def test_smaller_weights_or_kvcache_are_another_identity():
  plain, small = Model(config=MODEL), Model(config=MODEL, weights='int8')
  named = {
    model.identity(kv_dtype)
    for model in (plain, small)
    for kv_dtype in get_args(KVDtype)
  }
  assert len(named) == 8
  assert plain.identity('float32') == kv_identity(MODEL, 'random-0', 'float32')
  with pytest.raises(ValueError, match="Model.weights='int3'"):
    Model(config=MODEL, weights='int3')  # pyright: ignore
