# SPDX-License-Identifier: Apache-2.0
"""LMCache beside the store, where it is installed and where it is not."""

import pytest

from scripts.benches import turns
from scripts.benches.lmcache import LMCache
from scripts.benches.lmcache import lmcache_program
from scripts.benches.lmcache import missing_rows
from scripts.benches.lmcache import NAME
from scripts.benches.lmcache import TorchCopy

SIZE = 64 << 10


def test_without_it_a_row_says_so(monkeypatch, tmp_path):
  monkeypatch.setenv(turns.PEERS, str(tmp_path))
  with lmcache_program(1 << 20) as program:
    (row,) = missing_rows('store', program)
  assert program is None and row.value is None and row.ok
  assert 'not installed: make peers' in row.reference


def test_its_blocks_have_their_bytes_and_the_oldest_go():
  if not turns.interpreter(NAME):
    pytest.skip('LMCache is not installed: make peers')
  with lmcache_program(64 << 20) as program:
    assert program and program.name.startswith('lmcache')
    assert missing_rows('store', program) == []
    store = LMCache(program, SIZE, num_sources=3, room=8)
    while not store.is_full:
      assert store.put(2) > 0
    for turn in range(4):
      assert store.put(3) > 0 and store.get(turn, 3) > 0
    assert [*store.held] == [*range(12, 20)]
    store.check()
    assert TorchCopy(program).put(3) > 0
    with pytest.raises(RuntimeError):  # removed: its process has ended
      program.ask('verify', deadline_s=20.0, number=0)
