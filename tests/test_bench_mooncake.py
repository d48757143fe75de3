# SPDX-License-Identifier: Apache-2.0
"""Rows of the real Mooncake Store and of a plain socket."""

import numpy as np
import pytest

from mooncake_jax.transfer.mooncake_client import import_wheel
from scripts.benches import mooncake
from scripts.benches.loopback import loopback


def test_a_socket_gives_back_what_it_took():
  sent = np.arange(100_000, dtype=np.uint8)
  back = np.zeros_like(sent)
  with loopback(sent.nbytes) as other:
    other.put(sent)
    other.get(back)
  np.testing.assert_array_equal(back, sent)


def test_every_way_and_size_has_its_rows(monkeypatch):
  try:
    import_wheel('mooncake.store')
  except ImportError as missing:
    pytest.skip(str(missing))
  monkeypatch.setattr(mooncake, 'SIZES', {'1MiB': 1 << 20})
  monkeypatch.setattr(mooncake, 'STORE_BYTES', 64 << 20)
  monkeypatch.setattr(mooncake, 'ARENA_BYTES', 16 << 20)
  rows = {row.metric: row.value for row in mooncake.mooncake(quick=True)}
  assert all(value is not None and value > 0 for value in rows.values())
  for way in ('tcp', 'shared'):
    for what in ('put', 'get'):
      assert f'mooncake.{way}.1MiB.{what}_bytes_per_s.x16' in rows
  assert {'mooncake.memcpy.1MiB.bytes_per_s'} < rows.keys()
