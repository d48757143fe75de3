# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake Store as a segment: its own master, real clients."""

import random
import threading
import time

import numpy as np
import pytest

from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_errors import BlockCorrupt
from mooncake_jax.transfer.mooncake_errors import BlockMissing
from mooncake_jax.transfer.mooncake_errors import error_of
from mooncake_jax.transfer.mooncake_errors import LeaseHeld
from mooncake_jax.transfer.mooncake_errors import LeaseLost
from mooncake_jax.transfer.mooncake_errors import StoreFull
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from mooncake_jax.transfer.segment import Part
from scripts.mooncake_master import free_port
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage
from tests.mooncake_pieces import BLOCK
from tests.mooncake_pieces import block_of
from tests.mooncake_pieces import is_right
from tests.mooncake_pieces import MIB
from tests.mooncake_pieces import open_segment
from tests.mooncake_pieces import put
from tests.mooncake_pieces import read
from tests.mooncake_pieces import replica_of
from tests.mooncake_pieces import running_peer

try:
  import_wheel('mooncake.store')
except ImportError as missing:
  pytest.skip(str(missing), allow_module_level=True)

LEASE_S = 0.5


@pytest.fixture(scope='module')
def storage():
  """A master and a process that lends 32 MiB, for the tests that kill none."""
  with running_master(LEASE_S, client_ttl_s=2) as master:
    with running_storage(master.address, 32 * MIB) as server:
      yield master.address, server.address


@pytest.fixture(params=['tcp', 'shared memory'])
def segment(request, storage):
  """An empty store, over TCP and over memory shared with its storage."""
  master, daemon = storage
  shares = request.param == 'shared memory'
  made = open_segment(master, daemon=daemon if shares else None)
  yield made
  made.remove([replica_of(i).key for i in range(200)], force=True)
  made.close()


def test_what_was_put_is_read_bit_for_bit(segment: MooncakeSegment):
  for number in range(5):
    put(segment, number)
  for number in range(5):
    assert is_right(read(segment, number), number)
  keys = [replica_of(number).key for number in (4, 99)]
  assert segment.exists(keys) == [True, False]


def test_layers_are_read_one_range_at_a_time(segment: MooncakeSegment):
  put(segment, 1)
  for start, stop in ((2, 3), (0, 1), (0, 2)):
    (slices,) = segment.read(replica_of(1), (start, stop)).slices
    np.testing.assert_array_equal(slices, block_of(1)[start:stop])


def test_another_process_reads_what_this_one_put(segment, storage):
  with running_peer(storage[0]) as peer:
    put(segment, 1)
    assert peer.tell('read', 1) == 'ok'
    assert peer.tell('put', 2, 3) == 'ok'
    assert is_right(read(segment, 2), 2)
    assert is_right(read(segment, 3, replica_id=77), 3)


def test_a_second_put_keeps_the_first(segment: MooncakeSegment):
  put(segment, 1)
  put(segment, 1, replica_id=1000)
  assert is_right(read(segment, 1), 1)
  with pytest.raises(ValueError, match='there already'):
    put(segment, 1)


def test_a_missing_block_is_a_miss(segment: MooncakeSegment):
  with pytest.raises(LookupError, match='-704') as caught:
    read(segment, 150)
  assert isinstance(caught.value, BlockMissing)


def test_a_block_is_there_when_all_its_parts_are(segment: MooncakeSegment):
  block_L2SKH, replica = block_of(1), replica_of(1)
  segment.store(replica, Part(0, 2, (block_L2SKH[:2],)))
  assert segment.exists([replica.key]) == [False]
  with pytest.raises(BlockMissing):
    segment.read(replica, (0, 2))
  segment.store(replica, Part(2, 3, (block_L2SKH[2:],)))
  assert segment.exists([replica.key]) == [True]


def test_numbers_may_be_given_anew_after_a_reset(segment: MooncakeSegment):
  for number in (1, 2):
    put(segment, number)
  segment.read(replica_of(1), (0, 2))  # the rest is kept for who asks next
  segment.reset()
  assert not segment.used_bytes
  assert is_right(read(segment, 2, replica_id=1), 2)
  put(segment, 3, replica_id=2)
  assert is_right(read(segment, 1, replica_id=3), 1)


def test_a_part_of_another_block_is_refused(segment: MooncakeSegment):
  half = block_of(1)[:2].astype(np.float16)
  with pytest.raises(ValueError, match='float16'):
    segment.store(replica_of(1), Part(0, 2, (half,)))
  with pytest.raises(ValueError, match='no part of'):
    segment.store(replica_of(1), Part(0, 2, (block_of(1)[:2, :, :8],)))
  assert not segment.used_bytes


def test_foreign_bytes_under_a_key_are_removed_and_put_anew(segment):
  put(segment, 2)
  slot = segment._arena.take(1.0)
  segment._object.gather(slot, replica_of(2).key, [Part(0, 3, (block_of(2),))])
  assert segment._calls.put(replica_of(1).key, slot) == 0
  with pytest.raises(BlockCorrupt, match='checksum'):
    read(segment, 1)
  with pytest.raises(BlockMissing):
    read(segment, 1, replica_id=1001)
  put(segment, 1)
  assert is_right(read(segment, 1, replica_id=1002), 1)


def test_an_object_of_another_size_is_refused(segment: MooncakeSegment):
  slot = segment._arena.take(1.0)[:4096]
  assert segment._calls.put(replica_of(1).key, slot) == 0
  with pytest.raises(BlockCorrupt, match='4096 bytes'):
    read(segment, 1)


def test_old_blocks_make_room_for_new_ones(segment: MooncakeSegment):
  for number in range(200):  # 38 MiB into 32
    put(segment, number)
  kept = [segment.exists([replica_of(i).key])[0] for i in range(200)]
  assert kept[-1] and not kept[0]
  assert all(is_right(read(segment, i), i) for i, k in enumerate(kept) if k)


def test_a_full_store_fails_a_put_by_its_deadline(storage):
  segment = open_segment(storage[0], timeout_s=0.3)
  stop, start_s = threading.Event(), 0.0
  keys = [replica_of(number).key for number in range(200)]

  def renew_leases() -> None:
    while not stop.wait(0.05):
      segment.exists(keys)

  reader = threading.Thread(target=renew_leases)
  try:
    reader.start()
    with pytest.raises(StoreFull, match='-200'):
      for number in range(200):
        start_s = time.monotonic()
        put(segment, number)
        segment.exists(keys[number : number + 1])
    assert time.monotonic() - start_s < 0.5
  finally:
    stop.set()
    reader.join()
    segment.remove(keys, force=True)
    segment.close()


def test_a_lease_keeps_a_block_until_it_ends(segment: MooncakeSegment):
  put(segment, 1)
  read(segment, 1)
  key = replica_of(1).key
  assert segment.remove([key]) == 0
  until_s = time.monotonic() + 5 * LEASE_S
  while not segment.remove([key]):
    assert time.monotonic() < until_s
    time.sleep(0.05)
  assert segment.exists([key]) == [False]


def test_reads_leave_when_their_arrays_do(segment: MooncakeSegment):
  put(segment, 1)
  for _ in range(3 * 8):  # thrice the slots
    assert is_right(read(segment, 1), 1)
  held = [segment.read(replica_of(1, i), (0, 3)) for i in range(8)]
  with pytest.raises(StoreTimeout, match='slots'):
    segment.read(replica_of(1, 99), (0, 3))
  assert all(is_right(np.asarray(part.slices[0]), 1) for part in held)
  del held
  time.sleep(segment._config.pause_s)
  assert is_right(read(segment, 1), 1)


def test_readers_and_writers_never_see_wrong_bytes(segment, storage):
  """Two processes and four threads, more blocks than fit."""
  counts, wrong, errors = [], [], []

  def work(seed: int) -> None:
    rng, found = random.Random(seed), 0
    for turn in range(60):
      number, replica_id = rng.randrange(190), 1000 * (seed + 1) + turn
      try:
        if rng.random() < 0.4:
          put(segment, number, replica_id)
        elif is_right(read(segment, number, replica_id), number):
          found += 1
        else:
          wrong.append(number)
      except (BlockMissing, LeaseLost):
        pass
      except Exception as error:
        errors.append(error)
    counts.append(found)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
  with running_peer(storage[0]) as peer:
    for thread in threads:
      thread.start()
    rng = random.Random(9)
    for _ in range(60):
      word = rng.choice(['put', 'read'])
      answer = peer.tell(word, rng.randrange(190))
      assert answer.split(':')[0] in ('ok', 'BlockMissing', 'LeaseLost'), answer
    for thread in threads:
      thread.join()
  assert not wrong and not errors, errors
  assert len(counts) == 4 and sum(counts) > 0


def test_no_master_is_said_at_once():
  address = f'127.0.0.1:{free_port()}'
  with pytest.raises(StoreUnreachable, match=address):
    open_segment(address)


def test_codes_have_names():
  assert isinstance(error_of(-706, 'block'), LeaseHeld)
  assert isinstance(error_of(-901, 'block'), TimeoutError)
  assert 'error -1' in str(error_of(-1, 'block'))
  assert BLOCK.num_bytes(0, 3) == 192 << 10
