# SPDX-License-Identifier: Apache-2.0
"""The Transfer Engine's calls: batches, statuses, regions, deadlines."""

from collections.abc import Iterator
import statistics
import threading
import time

import numpy as np
import pytest

from engine_pieces import decode_row
from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import ops_of
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.transfer.regions import Region

PAGES = DevicePages('a', (1, 2))
LONG_S = 60.0


@pytest.fixture(scope='module')
def desk(tmp_path_factory) -> Iterator[Desk]:
  url = tmp_path_factory.mktemp('ssd').as_uri()
  specs = tiny_spec('a', ssd_url=url, ssd_bytes=1 << 24), tiny_spec('c')
  with tiny_backend(*specs) as backend:
    warmup(backend)
    desk = Desk(backend)
    desk.prefill('a', random_tokens(32, 0), range(1, 9))
    yield desk


@pytest.fixture
def engine(desk):
  return desk.backend.transfers


@pytest.fixture
def replicas(desk) -> Iterator[list[Replica]]:
  made = [Replica('a', 100 + i, bytes([i])) for i in range(40)]
  yield made
  desk.backend.drop(tuple(made))


def later(engine, seconds: float = LONG_S) -> float:
  return engine._now_s() + seconds


def test_a_batch_goes_from_waiting_to_completed_with_its_bytes(
  engine, replicas
):
  ops = ops_of(PAGES, replicas[0])
  batch = engine.allocate_batch(3)
  assert engine.status(batch, 2).state == 'WAITING'
  engine.submit(batch, ops[:1])
  engine.submit(batch, ops[1:])
  ends = engine.wait(batch, later(engine))
  assert [end.state for end in ends] == ['COMPLETED', 'COMPLETED']
  assert [end.moved_bytes for end in ends] == [op.num_bytes for op in ops]
  assert engine.status(batch, 2).state == 'WAITING'
  with pytest.raises(ValueError, match='none of the 3'):
    engine.status(batch, 3)
  with pytest.raises(ValueError, match='room for 3'):
    engine.submit(batch, ops)
  engine.free_batch(batch)
  with pytest.raises(ValueError, match='there is no batch'):
    engine.status(batch, 0)


def busy_pages(desk) -> tuple[int, DevicePages]:
  """A decode work that goes on, and pages that it writes."""
  row = decode_row('r', 1, 0, range(60, 92), 120)
  work = desk.backend.decode('a', DecodeBatch((row,)), 120)
  return work, DevicePages('a', (60, 61))


def stop(desk, work: int) -> None:
  desk.backend.cancel(work)
  desk.end_of(work)


def test_a_pending_batch_is_not_freed_and_a_wait_ends_at_its_deadline(
  desk, engine, replicas
):
  work, pages = busy_pages(desk)
  batch = engine.allocate_batch(2)
  engine.submit(batch, ops_of(pages, replicas[0]))
  ends = engine.wait(batch, later(engine, 0.01))
  assert all(end.is_pending for end in ends)
  with pytest.raises(ValueError, match='under way'):
    engine.free_batch(batch)
  stop(desk, work)
  ends = engine.wait(batch, later(engine))
  assert {end.state for end in ends} == {'COMPLETED'}
  engine.free_batch(batch)


def test_ops_end_as_canceled_or_timeout_and_say_why(desk, engine, replicas):
  work, pages = busy_pages(desk)
  late, gone = engine.allocate_batch(2), engine.allocate_batch(2)
  engine.submit(late, ops_of(pages, replicas[0]), 0, later(engine, 0.01))
  engine.submit(gone, ops_of(pages, replicas[1]))
  engine.cancel(gone)
  ends = engine.wait(gone, later(engine))
  assert [end.state for end in ends] == ['CANCELED'] * 2
  ends = engine.wait(late, later(engine))
  assert [end.state for end in ends] == ['TIMEOUT'] * 2
  assert all('deadline_s' in end.error for end in ends)
  assert all(end.moved_bytes == 0 for end in ends)
  stop(desk, work)


def test_completed_is_readable_and_a_source_under_way_is_waited_for(
  desk, engine, replicas
):
  """The source is computed, copied, and overwritten by the next chunk."""
  tokens, other = random_tokens(16, 1), random_tokens(16, 2)
  pages = (20, 21, 22, 23)
  for chunk in (tokens, other):
    desk.backend.prefill('a', PrefillChunk('r', 0, 0, 16, pages, chunk))
    if chunk is tokens:
      batch = engine.allocate_batch(2)
      engine.submit(batch, ops_of(DevicePages('a', (20, 21)), replicas[0]))
  ends = engine.wait(batch, later(engine))
  assert {end.state for end in ends} == {'COMPLETED'}
  found = desk.bytes_of(replicas[0])
  desk.prefill('a', tokens, pages)
  desk.move(DevicePages('a', (20, 21)), replicas[1])
  np.testing.assert_array_equal(found, desk.bytes_of(replicas[1]))


def test_unregistered_memory_fails_and_says_which(desk, engine, replicas):
  for op in (
    *ops_of(DevicePages('x', (1, 2)), replicas[0])[:1],
    *ops_of(PAGES, Replica('x/ssd', 1, b'k'))[:1],
    *ops_of(PAGES, DevicePages('c', (1, 500)))[:1],
  ):
    batch = engine.allocate_batch(1)
    engine.submit(batch, [op])
    (end,) = engine.wait(batch, later(engine))
    assert end.state == 'FAILED' and 'registered' in end.error
    engine.free_batch(batch)


def test_a_region_is_registered_once_and_unregistered_when_idle(
  desk, engine, replicas
):
  with pytest.raises(ValueError, match='overlaps'):
    engine.register(Region('a', 'device', range(100, 300)))
  with pytest.raises(ValueError, match='overlaps'):
    engine.register(Region('a/ssd', 'ssd'))
  with pytest.raises(ValueError, match='is not registered'):
    engine.unregister(Region('c', 'device', range(5)))
  with pytest.raises(ValueError, match='have pages'):
    Region('c', 'host', range(5))
  work, pages = busy_pages(desk)
  batch = engine.allocate_batch(2)
  engine.submit(batch, ops_of(pages, replicas[0]))
  host = Region('a', 'host')
  with pytest.raises(ValueError, match='in use'):
    engine.unregister(host)
  stop(desk, work)
  engine.wait(batch, later(engine))
  engine.unregister(host)
  end = desk.transfer(*ops_of(PAGES, replicas[1]))
  assert end.op_status == ('failed', 'failed')
  engine.register(host)
  desk.move(PAGES, replicas[1])


def test_pages_may_be_registered_in_ranges(desk, engine):
  whole = Region('c', 'device', range(128))
  engine.unregister(whole)
  for pages in (range(0, 10), range(10, 20)):
    engine.register(Region('c', 'device', pages))
  desk.move(PAGES, DevicePages('c', (9, 10)))
  end = desk.transfer(*ops_of(PAGES, DevicePages('c', (19, 20))))
  assert end.status == 'failed' and '[20]' in end.error
  for pages in (range(0, 10), range(10, 20)):
    engine.unregister(Region('c', 'device', pages))
  engine.register(whole)


def test_links_count_their_bytes_and_seconds(desk, engine, replicas):
  before = engine.counts()
  desk.move(PAGES, replicas[0])
  ssd = Replica('a/ssd', 1, b'k')
  desk.move(replicas[0], ssd)
  desk.move(ssd, DevicePages('c', (1, 2)))
  desk.backend.drop((ssd,))
  after = engine.counts()
  for link in ('a-host', 'a/ssd-write', 'a/ssd-read', 'c-device'):
    moved = after[link].num_bytes - before[link].num_bytes
    assert moved == LAYOUT.block_bytes, link
    # A link counts its seconds once it has told of the move.
    until_s = time.monotonic() + 10
    while engine.counts()[link].busy_s == before[link].busy_s:
      assert time.monotonic() < until_s, link
  assert after['c-host'] == before['c-host']


@pytest.mark.parametrize('num_blocks', [1, 12])
def test_submit_returns_at_once_while_bytes_move(
  desk, engine, replicas, num_blocks
):
  """Far below a block's time; the bench holds it to 0.5 ms."""
  times_s = []
  for _ in range(10):
    desk.backend.drop(tuple(replicas))
    ops = [op for r in replicas[:num_blocks] for op in ops_of(PAGES, r)]
    batch = engine.allocate_batch(len(ops))
    start_s = time.perf_counter()
    engine.submit(batch, ops)
    times_s.append(time.perf_counter() - start_s)
    ends = engine.wait(batch, later(engine))
    assert {end.state for end in ends} == {'COMPLETED'}
    engine.free_batch(batch)
  assert statistics.median(times_s) < 0.02


def test_any_thread_may_submit_and_wait(engine, replicas):
  states = []

  def work(replica):
    batch = engine.allocate_batch(2)
    engine.submit(batch, ops_of(PAGES, replica))
    states.append({end.state for end in engine.wait(batch, later(engine))})

  threads = [threading.Thread(target=work, args=(r,)) for r in replicas[:8]]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(LONG_S)
  assert states == [{'COMPLETED'}] * 8
