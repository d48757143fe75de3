# SPDX-License-Identifier: Apache-2.0
"""Blocks to SSDs and back through the backend, also when things break."""

from collections.abc import Iterator
import os
from pathlib import Path
import shutil
import threading

import numpy as np
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import ops_of
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.distributed.handover import Estate
from mooncake_jax.engine.warmup import warmup

PAGES = tuple(range(1, 9))
BLOCK_BYTES = LAYOUT.block_bytes


def ssd_spec(name: str, folder: Path, **kwargs):
  at = folder / name
  at.mkdir(exist_ok=True)
  fields = {'ssd_url': at.as_uri(), 'ssd_bytes': 8 * BLOCK_BYTES}
  return tiny_spec(name, **{**fields, **kwargs})


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
  return tmp_path_factory.mktemp('ssd')


@pytest.fixture(scope='module')
def shared(folder) -> Iterator[Desk]:
  """Instances on 1 and 2 devices; pages 1 to 8 hold 32 random tokens."""
  specs = ssd_spec('a', folder), ssd_spec('b', folder, num_devices=2)
  with tiny_backend(*specs) as backend:
    warmup(backend)
    desk = Desk(backend)
    for name in 'ab':
      desk.prefill(name, random_tokens(32, seed=ord(name)), PAGES)
    yield desk


@pytest.fixture
def desk(shared, folder) -> Iterator[Desk]:
  """The shared backend, its segments empty before and after."""
  yield shared
  for instance in shared.backend.instances.values():
    ids = instance.segment.replica_ids
    dropped = [Replica(instance.spec.name, i) for i in ids]
    dropped += [ssd(instance.spec.name, i) for i in range(40)]
    shared.backend.drop(tuple(dropped))
    assert instance.segment.used_bytes == 0
    assert instance.ssd.segment.used_bytes == 0


def key(i: int) -> bytes:
  return i.to_bytes(32, 'big')


def ssd(name: str, i: int) -> Replica:
  return Replica(f'{name}/ssd', i, key(i))


def file_of(folder: Path, replica: Replica, layers: str = '0-2') -> Path:
  name = replica.segment.removesuffix('/ssd')
  return folder / name / replica.key.hex() / layers


def host_bytes(desk: Desk, src: DevicePages | Replica) -> np.ndarray:
  """Canonical bytes of a source, by way of a host replica of 'a'."""
  made = Replica('a', 10_000 + len(desk.completions))
  desk.move(src, made)
  found = desk.bytes_of(made)
  desk.backend.drop((made,))
  return found


@pytest.mark.parametrize('source', 'ab')
@pytest.mark.parametrize('target', 'ab')
def test_all_ways_over_an_ssd_keep_every_bit(desk, source, target):
  there = DevicePages(source, (3, 4))
  expected = host_bytes(desk, there)
  programs = desk.backend.compiled_programs()
  straight, via_host, copied = ssd(source, 1), ssd(source, 2), ssd(target, 3)
  host = Replica(source, 1)
  desk.move(there, straight)
  desk.move(there, host)
  desk.move(host, via_host)
  desk.move(straight, copied)  # from one SSD to another
  here = DevicePages(target, (20, 30))
  for replica in (straight, via_host, copied):
    desk.move(replica, here)
    np.testing.assert_array_equal(host_bytes(desk, here), expected)
    np.testing.assert_array_equal(host_bytes(desk, replica), expected)
  assert desk.backend.compiled_programs() == programs


def test_an_ssd_holds_its_capacity_and_not_a_byte_more(desk):
  there = DevicePages('a', (1, 2))
  for i in range(8):
    desk.move(there, ssd('a', i))
  end = desk.transfer(*ops_of(there, ssd('a', 8)))
  assert end.op_status == ('failed', 'failed')
  assert f'capacity_bytes={8 * BLOCK_BYTES}' in end.error
  desk.backend.drop((ssd('a', 0),))
  desk.move(there, ssd('a', 9))


@pytest.mark.parametrize('damage', ['truncated', 'flipped', 'gone'])
def test_a_bad_file_fails_the_op_and_is_removed(desk, folder, damage):
  replica, there = ssd('a', 1), DevicePages('a', (1, 2))
  desk.move(there, replica)
  file = file_of(folder, replica)
  data = bytearray(file.read_bytes())
  if damage == 'gone':
    file.unlink()
  elif damage == 'flipped':
    data[200] ^= 16
    file.write_bytes(data)
  else:
    file.write_bytes(data[:-7])
  end = desk.transfer(*ops_of(replica, DevicePages('b', (20, 21))))
  assert end.op_status == ('failed', 'completed')
  assert 'entry' in end.error and '\n' not in end.error
  desk.backend.drop((replica,))
  desk.move(there, ssd('a', 2))  # written after what was dropped is deleted
  assert not file.exists()


def test_a_folder_that_becomes_unwritable_fails_writes_only(tmp_path):
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk = Desk(backend)
    there = DevicePages('a', (1, 2))
    desk.move(there, ssd('a', 1))
    expected = host_bytes(desk, ssd('a', 1))
    # Root may write anywhere; it can't make a folder where a file is.
    file_of(tmp_path, ssd('a', 2)).parent.write_text('in the way')
    end = desk.transfer(*ops_of(there, ssd('a', 2)))
    assert end.op_status == ('failed', 'failed')
    assert 'Error' in end.error and '\n' not in end.error
    np.testing.assert_array_equal(host_bytes(desk, ssd('a', 1)), expected)
    assert backend.tiers['a/ssd'].segment.used_bytes == BLOCK_BYTES
    shutil.rmtree(tmp_path / 'a')
    for op in (
      *ops_of(there, ssd('a', 3)),
      *ops_of(ssd('a', 1), DevicePages('a', (20, 21))),
    ):
      assert desk.transfer(op).status == 'failed'
    desk.move(there, Replica('a', 3))


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write anywhere')
def test_a_folder_without_permission_fails_writes_only(tmp_path):
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    (tmp_path / 'a').chmod(0o500)
    end = Desk(backend).transfer(*ops_of(DevicePages('a', (1, 2)), ssd('a', 1)))
    (tmp_path / 'a').chmod(0o700)
    assert end.op_status == ('failed', 'failed')
    assert 'Permission' in end.error


def test_a_duplicate_put_keeps_the_old_value(desk):
  first, second = DevicePages('a', (1, 2)), DevicePages('a', (3, 4))
  replica = ssd('a', 1)
  desk.move(first, replica)
  end = desk.transfer(*ops_of(second, replica))
  assert end.op_status == ('failed', 'failed')
  assert 'there already' in end.error
  expected = host_bytes(desk, first)
  np.testing.assert_array_equal(host_bytes(desk, replica), expected)


def test_a_wrong_number_of_pages_fails_and_leaves_nothing(desk):
  replica = ssd('a', 1)
  end = desk.transfer(*ops_of(DevicePages('a', (1,)), replica))
  assert end.status == 'failed' and 'no part of a block' in end.error
  desk.move(DevicePages('a', (1, 2)), replica)
  end = desk.transfer(*ops_of(replica, DevicePages('a', (20,))))
  assert end.op_status == ('failed', 'failed') and '8 tokens' in end.error


def stall(tier) -> threading.Event:
  """Holds up the read link until the event is set."""
  go, stalled = threading.Event(), threading.Event()
  read = tier.segment.read

  def slow(*args):
    stalled.set()
    assert go.wait(30)
    tier.segment.read = read
    return read(*args)

  tier.segment.read = slow
  return go


def test_a_reader_past_its_deadline_times_out_and_nothing_is_written(desk):
  replica, to = ssd('a', 1), DevicePages('a', (20, 21))
  desk.move(DevicePages('a', (1, 2)), replica)
  before = host_bytes(desk, to)
  go = stall(desk.backend.tiers['a/ssd'])
  end = desk.transfer(*ops_of(replica, to), timeout_s=0.05)
  assert end.op_status == ('timeout', 'timeout')
  go.set()
  np.testing.assert_array_equal(host_bytes(desk, to), before)
  desk.move(replica, to)


def test_a_replica_dropped_while_it_is_read_fails_or_gives_its_bytes(desk):
  old, new, to = ssd('a', 1), ssd('a', 2), DevicePages('a', (20, 21))
  new = Replica(new.segment, new.replica_id, old.key)
  desk.move(DevicePages('a', (1, 2)), old)
  go = stall(desk.backend.tiers['a/ssd'])
  reading = desk.backend.transfer(ops_of(old, to), 0, 1e9)
  desk.backend.drop((old,))
  desk.move(DevicePages('a', (3, 4)), new)  # the same key, other bytes
  go.set()
  end = desk.end_of(reading)
  assert end.op_status == ('failed', 'failed') and 'not here' in end.error
  expected = host_bytes(desk, DevicePages('a', (3, 4)))
  np.testing.assert_array_equal(host_bytes(desk, new), expected)
  desk.backend.drop((new,))


def test_an_urgent_fetch_overtakes_those_that_wait(desk):
  for i in range(6):
    desk.move(DevicePages('a', (1, 2)), ssd('a', i))
  go = stall(desk.backend.tiers['a/ssd'])
  works = [
    desk.backend.transfer(ops_of(ssd('a', i), Replica('a', i)), p, 1e9)
    for i, p in enumerate((5, 5, 5, 0))
  ]
  go.set()
  for work in works:
    assert desk.end_of(work).status == 'completed'
  order = [work for work in desk.completions if work in works]
  assert order.index(works[3]) <= 1  # one was under way


def test_reads_under_way_are_bounded_and_come_back(desk):
  with_budget = desk.backend.tiers['a/ssd'].read_bytes
  for i in range(6):
    desk.move(DevicePages('a', (1, 2)), ssd('a', i))
  ops = [op for i in range(6) for op in ops_of(ssd('a', i), Replica('b', i))]
  assert desk.transfer(*ops).status == 'completed'
  assert with_budget.taken_bytes == 0


def test_a_backend_closed_in_mid_transfer_hangs_nowhere(tmp_path):
  before = set(threading.enumerate())
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk = Desk(backend)
    desk.move(DevicePages('a', (1, 2)), ssd('a', 1))
    for i in range(30):
      to = Replica('a', 50 + i)
      backend.transfer(ops_of(ssd('a', 1), to), 0, 1e9)
      backend.transfer(ops_of(DevicePages('a', (1, 2)), ssd('a', i)), 0, 1e9)
  assert not set(threading.enumerate()) - before
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    adopted = backend.adopt('a/ssd')
    assert (key(1), BLOCK_BYTES) in adopted


def test_parts_are_adopted_whatever_ranges_they_are_asked_for_in(tmp_path):
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk = Desk(backend)
    desk.prefill('a', random_tokens(32, seed=1), PAGES)
    whole = TransferOp(DevicePages('a', (1, 2)), ssd('a', 1), 0, 3, BLOCK_BYTES)
    assert desk.transfer(whole).status == 'completed'
    expected = host_bytes(desk, DevicePages('a', (1, 2)))
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk = Desk(backend)
    assert backend.adopt('a/ssd') == [(key(1), BLOCK_BYTES)]
    again = Replica('a/ssd', 77, key(1))
    np.testing.assert_array_equal(host_bytes(desk, again), expected)
    desk.move(again, DevicePages('a', (20, 21)))
    here = host_bytes(desk, DevicePages('a', (20, 21)))
    np.testing.assert_array_equal(here, expected)


def test_the_next_driver_is_told_of_what_was_adopted_and_not_used(tmp_path):
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk = Desk(backend)
    for i in (1, 2, 3):
      desk.move(DevicePages('a', (1, 2)), ssd('a', i))
  with tiny_backend(ssd_spec('a', tmp_path)) as backend:
    desk, estate = Desk(backend), Estate(backend)
    assert {k for k, _ in estate.blocks('a/ssd')} == {key(1), key(2), key(3)}
    read, gone = ssd('a', 71)._replace(key=key(1)), ssd('a', 72)
    gone = gone._replace(key=key(2))
    estate.claim(ops_of(read, DevicePages('a', (3, 4))))
    desk.move(read, DevicePages('a', (3, 4)))
    estate.forget([gone])
    backend.drop((gone,))
    estate.hand_over()
    assert {k for k, _ in estate.blocks('a/ssd')} == {key(1), key(3)}
    left = ssd('a', 80)._replace(key=key(3))
    desk.move(left, DevicePages('a', (3, 4)))


def test_a_bad_part_in_host_memory_is_found_where_all_are_checked(tmp_path):
  spec = ssd_spec('a', tmp_path, checksums='all')
  with tiny_backend(spec) as backend:
    desk = Desk(backend)
    segment = backend.instances['a'].segment
    there, good, bad = (
      DevicePages('a', (1, 2)),
      Replica('a', 1),
      Replica('a', 2),
    )
    for replica in (good, bad):
      desk.move(there, replica)
    part = segment._parts[2][0]
    other = tuple(array + 1 for array in map(np.asarray, part.slices))
    for to in (there, ssd('a', 5), Replica('a', 6)):
      segment._parts[2] = [part._replace(slices=other)]
      end = desk.transfer(TransferOp(bad, to, 0, 2, 1))
      assert end.status == 'failed' and 'checksum' in end.error
      assert 2 not in segment._parts
    desk.move(good, there)
    desk.move(good, ssd('a', 1))
    desk.move(ssd('a', 1), Replica('a', 9))
    assert segment._parts[9][0].total is not None
