# SPDX-License-Identifier: Apache-2.0
"""The loops that are measured do what they say, on a small scale."""

import numpy as np
import pytest

from mooncake_jax.backend import Replica
from scripts.benches.bare import Bare
from scripts.benches.bare import read_file
from scripts.benches.bare import write_file
from scripts.benches.cycle import Cycle
from scripts.benches.steady import measured
from scripts.benches.sweep import modes
from scripts.benches.sweep import panel
from scripts.benches.sweep import SMALL
from scripts.benches.transfer import Loop
from scripts.benches.transfers import blocks_of
from scripts.benches.transfers import NAME

SIZE = 64 << 10
ROOM = 16 * SIZE


@pytest.fixture(scope='module')
def blocks(tmp_path_factory):
  with blocks_of(
    8,
    SMALL.num_layers,
    SMALL,
    8 * SIZE,
    host_bytes=ROOM,
    ssd_url=tmp_path_factory.mktemp('ssd').as_uri(),
    ssd_bytes=ROOM,
  ) as blocks:
    assert blocks.layout.block_bytes == SIZE
    blocks.fill()
    yield blocks


def test_a_full_store_evicts_and_has_the_right_bytes(blocks):
  cycle = Cycle(blocks, ROOM, batch=2)
  others = {'device_put': Bare(SIZE, 4, 8)}
  while not others['device_put'].is_full:
    others['device_put'].put(1)
  times = measured(cycle, others, depth=2, turns=3)
  assert min(times.values()) > 0
  assert set(times) == {
    (what, way)
    for what in ('put', 'get')
    for way in ('store', 'device_put', 'memcpy')
  }
  assert cycle.blocks_evicted >= 8
  cycle.check()
  cycle.master.check()
  cycle.clear()


def test_wrong_bytes_are_noticed(blocks):
  cycle = Cycle(blocks, ROOM, batch=1)
  cycle.put(2)
  cycle.check()
  (replica,) = cycle.master.peek((1).to_bytes(32, 'big'))
  segment = blocks.backend.instances[NAME].segment
  (part,) = segment.read(replica.replica_id, 0, 4)
  segment.drop([replica.replica_id])
  bad = part._replace(slices=(np.asarray(part.slices[0]) + 1,))
  segment.put(replica.replica_id, bad)
  with pytest.raises(RuntimeError, match='other bytes'):
    cycle.check()
  cycle.clear()


def test_every_link_is_timed_and_left_empty(blocks, tmp_path):
  loop = Loop(blocks, tmp_path)
  times = loop.times(2, 2, turns=1)
  assert {what for what, _ in times} == {
    'offload',
    'onload',
    'ssd_write',
    'ssd_read',
  }
  assert min(times.values()) > 0 and not list(tmp_path.iterdir())
  assert not blocks.backend.instances[NAME].segment.replica_ids


def test_a_failed_move_is_no_figure(blocks, tmp_path):
  loop = Loop(blocks, tmp_path)
  with pytest.raises(RuntimeError, match='failed'):
    loop._move([Replica(NAME, 999)], [blocks.pages(0)], 1)


def test_files_keep_their_bytes(tmp_path):
  block = np.arange(1000, dtype=np.float32)
  warm = np.zeros_like(block)
  assert write_file(tmp_path / 'a', block) > 0
  assert read_file(tmp_path / 'a', warm) > 0
  np.testing.assert_array_equal(warm, block)
  assert read_file(tmp_path / 'a', None) > 0


def test_large_blocks_move_in_smaller_batches():
  assert modes(False, 64 << 20) == [(1, 1), (1, 2), (2, 1)]
  assert panel(64 << 20, (1, 2)) == '1x16' and panel(1 << 20, (1, 4)) == '1x4'
  assert modes(False, 64 << 10) == [(1, 1), (1, 4), (1, 16), (16, 1)]
