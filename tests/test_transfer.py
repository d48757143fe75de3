# SPDX-License-Identifier: Apache-2.0
"""Bytes on the move: unchanged, in order, on time, or said not to be."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from itertools import pairwise
import threading

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
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp

BLOCK_BYTES = LAYOUT.block_bytes
PAGES = tuple(range(1, 9))


@pytest.fixture(scope='module')
def desk() -> Iterator[Desk]:
  """Instances on 1, 2 and 4 devices: KV heads whole, split, and copied.

  The pages 1 to 8 of each hold the KVCache of 32 random tokens.
  """
  specs = tiny_spec('a'), tiny_spec('b', num_devices=2)
  specs += (tiny_spec('d', num_devices=4),)
  with tiny_backend(*specs) as backend:
    desk = Desk(backend)
    for name in 'abd':
      desk.prefill(name, random_tokens(32, seed=ord(name)), PAGES)
    yield desk


@pytest.fixture
def replicas(desk) -> Iterator[Iterator[Replica]]:
  """Replicas that are dropped after the test."""
  made = []

  def make():
    for i in range(1000):
      made.append(Replica('abd'[i % 3], i))
      yield made[-1]

  yield make()
  desk.backend.drop(tuple(made))
  assert all(i.segment.used_bytes == 0 for _, i in instances(desk))


def instances(desk):
  return desk.backend.instances.items()


def in_segment(replicas: Iterator[Replica], name: str) -> Replica:
  return next(r for r in replicas if r.segment == name)


@pytest.mark.parametrize('name', 'abd')
def test_offload_and_onload_are_inverse_bit_for_bit(desk, replicas, name):
  first = in_segment(replicas, name)
  second = in_segment(replicas, name)
  desk.move(DevicePages(name, (3, 4)), first)
  desk.move(first, DevicePages(name, (20, 30)))
  desk.move(DevicePages(name, (20, 30)), second)
  block = desk.bytes_of(first)
  assert block.shape == (3, 2, 8, 2, 8) and np.abs(block).min() > 0
  np.testing.assert_array_equal(block, desk.bytes_of(second))


@pytest.mark.parametrize('source', 'abd')
@pytest.mark.parametrize('target', 'abd')
def test_a_block_is_read_by_an_instance_of_another_tensor_parallelism(
  desk, replicas, source, target
):
  put, copied, back = (
    in_segment(replicas, name) for name in (source, target, target)
  )
  desk.move(DevicePages(source, (5, 6)), put)
  desk.move(put, copied)  # between segments
  desk.move(copied, DevicePages(target, (41, 42)))
  desk.move(DevicePages(target, (41, 42)), back)
  block = desk.bytes_of(put)
  np.testing.assert_array_equal(block, desk.bytes_of(copied))
  np.testing.assert_array_equal(block, desk.bytes_of(back))
  desk.move(DevicePages(source, (5, 6)), DevicePages(target, (51, 52)))
  again = in_segment(replicas, target)
  desk.move(DevicePages(target, (51, 52)), again)
  np.testing.assert_array_equal(block, desk.bytes_of(again))


def test_a_segment_holds_one_copy_of_each_head(desk, replicas):
  for name in 'abd':
    desk.move(DevicePages(name, (1, 2)), in_segment(replicas, name))
    segment = desk.backend.instances[name].segment
    assert segment.used_bytes == BLOCK_BYTES


def test_parts_may_be_read_in_other_layer_ranges_than_written(desk, replicas):
  split, whole = in_segment(replicas, 'a'), in_segment(replicas, 'a')
  pages = DevicePages('a', (1, 2))
  desk.move(pages, split)  # as [0, 2) and [2, 3)
  to = DevicePages('b', (20, 21))
  assert desk.transfer(TransferOp(split, to, 0, 3, 1)).status == 'completed'
  assert desk.transfer(TransferOp(to, whole, 0, 3, 1)).status == 'completed'
  np.testing.assert_array_equal(desk.bytes_of(split), desk.bytes_of(whole))
  middle = DevicePages('a', (22, 23))
  end = desk.transfer(
    TransferOp(whole, middle, 0, 1, 1), TransferOp(whole, middle, 1, 3, 1)
  )
  assert end.status == 'completed'
  last = in_segment(replicas, 'a')
  desk.move(middle, last)
  np.testing.assert_array_equal(desk.bytes_of(split), desk.bytes_of(last))


def test_reading_what_is_not_there_fails_that_op_only(desk, replicas):
  there, gone = in_segment(replicas, 'a'), in_segment(replicas, 'a')
  desk.move(DevicePages('a', (1, 2)), there)
  desk.move(DevicePages('a', (1, 2)), gone)
  desk.backend.drop((gone,))
  end = desk.transfer(
    *(TransferOp(r, DevicePages('b', (20, 21)), 0, 2, 1) for r in (gone, there))
  )
  assert end.status == 'failed'
  assert end.op_status == ('failed', 'completed')
  assert 'is not here' in end.error


def test_a_missing_part_fails_the_read(desk, replicas):
  replica = in_segment(replicas, 'a')
  ops = ops_of(DevicePages('a', (1, 2)), replica)
  assert desk.transfer(ops[1]).status == 'completed'
  end = desk.transfer(*ops_of(replica, DevicePages('b', (20, 21))))
  assert end.op_status == ('failed', 'completed')


def test_what_does_not_fit_the_segment_is_refused_and_named():
  with tiny_backend(tiny_spec('a', host_bytes=2 * BLOCK_BYTES)) as backend:
    desk = Desk(backend)
    pages = DevicePages('a', (1, 2))
    for i in range(2):
      desk.move(pages, Replica('a', i))
    end = desk.transfer(*ops_of(pages, Replica('a', 2)))
    assert end.op_status == ('failed', 'failed')
    assert f'capacity_bytes={2 * BLOCK_BYTES}' in end.error
    backend.drop((Replica('a', 0),))
    desk.move(pages, Replica('a', 3))


@pytest.mark.parametrize(
  'op, why',
  [
    (
      TransferOp(DevicePages('a', (1, 2)), DevicePages('b', (1,)), 0, 3, 1),
      '2 pages to 1',
    ),
    (
      TransferOp(DevicePages('x', (1,)), DevicePages('b', (1,)), 0, 3, 1),
      "no instance 'x'",
    ),
    (
      TransferOp(DevicePages('a', (1,)), DevicePages('y', (1,)), 0, 3, 1),
      "no instance 'y'",
    ),
    (
      TransferOp(DevicePages('a', (999,)), DevicePages('b', (1,)), 0, 3, 1),
      'not in',
    ),
    (
      TransferOp(DevicePages('a', (1,)), DevicePages('b', (999,)), 0, 3, 1),
      'not in',
    ),
  ],
)
def test_an_op_that_cannot_be_done_fails_in_one_line(desk, op, why):
  end = desk.transfer(op)
  assert end.op_status == ('failed',)
  assert why in end.error and '\n' not in end.error
  assert desk.transfer().status == 'completed'


def test_a_transfer_past_its_deadline_times_out_and_writes_nothing(
  desk, replicas
):
  replica = in_segment(replicas, 'a')
  ops = ops_of(DevicePages('a', (1, 2)), replica)
  end = desk.transfer(*ops, timeout_s=-1.0)
  assert end.status == 'timeout'
  assert end.op_status == ('timeout', 'timeout')
  assert desk.backend.instances['a'].segment.used_bytes == 0


def test_a_deadline_ends_a_transfer_that_waits_for_a_busy_instance(desk):
  """The pages are written by a decode work that goes on and on."""
  row = decode_row('r', 1, 0, range(60, 92), 120)
  busy = desk.backend.decode('a', DecodeBatch((row,)), 120)
  ops = ops_of(DevicePages('a', (60, 61)), DevicePages('b', (60, 61)))
  end = desk.transfer(*ops, timeout_s=0.001)
  assert end.status == 'timeout'
  desk.backend.cancel(busy)
  desk.end_of(busy)


def test_pages_that_a_decode_writes_are_read_after_it(desk, replicas):
  row = decode_row('r', 1, 0, (60, 61, 62, 63), 16)
  work = desk.backend.decode('a', DecodeBatch((row,)), 16)
  early, late = in_segment(replicas, 'a'), in_segment(replicas, 'a')
  pages = DevicePages('a', (62, 63))
  end = desk.transfer(*ops_of(pages, early))
  assert desk.completions[work][-1].done
  assert end.status == 'completed'
  desk.move(pages, late)
  np.testing.assert_array_equal(desk.bytes_of(early), desk.bytes_of(late))


def test_a_transfer_waits_for_the_one_that_writes_its_source(desk, replicas):
  chain: list[DevicePages | Replica] = [DevicePages('a', (1, 2))]
  stops = [in_segment(replicas, 'abd'[i % 3]) for i in range(6)]
  for i, stop in enumerate(stops):
    name = stop.segment
    chain.append(stop)
    chain.append(DevicePages(name, (70 + 2 * i, 71 + 2 * i)))
  works = [
    desk.backend.transfer(ops_of(src, dst), len(chain) - i, 1e9)
    for i, (src, dst) in enumerate(pairwise(chain))
  ]
  assert {desk.end_of(work).status for work in works} == {'completed'}
  replica = in_segment(replicas, 'd')
  desk.move(chain[-1], replica)
  np.testing.assert_array_equal(desk.bytes_of(replica), desk.bytes_of(stops[0]))


@dataclass
class Gate:
  """A task that keeps an owner busy until it is opened."""

  opened: threading.Event = field(default_factory=threading.Event)

  def run(self, desk) -> None:
    assert self.opened.wait(60)


def test_what_reads_a_write_that_timed_out_fails(desk, replicas):
  gate = Gate()
  desk.backend.instances['a'].stages[0].owner.post(gate)
  here, there = DevicePages('a', (60, 61)), DevicePages('b', (30, 31))
  now_s = desk.backend.now_s()
  late = desk.backend.transfer(ops_of(here, there), 0, now_s + 0.2)
  reader = ops_of(there, in_segment(replicas, 'b'))
  reader = desk.backend.transfer(reader, 0, now_s + 60)
  assert desk.end_of(late).status == 'timeout'
  end = desk.end_of(reader)
  gate.opened.set()
  assert end.status == 'failed' and 'source was not written' in end.error


def test_dropping_a_replica_that_is_being_written_leaves_no_bytes(desk):
  pages = DevicePages('a', (1, 2))
  replicas = tuple(Replica('a', 5000 + i) for i in range(20))
  works = [desk.backend.transfer(ops_of(pages, r), 0, 1e9) for r in replicas]
  desk.backend.drop(replicas)
  for work in works:
    assert desk.end_of(work).status in ('completed', 'failed')
  assert desk.backend.instances['a'].segment.used_bytes == 0


def test_a_cancelled_transfer_ends_once_and_hurts_no_other(desk, replicas):
  pages = DevicePages('a', (1, 2))
  made = [in_segment(replicas, 'a') for _ in range(30)]
  works = [desk.backend.transfer(ops_of(pages, r), 0, 1e9) for r in made]
  for work in works[::2]:
    desk.backend.cancel(work)
  ends = [desk.end_of(work).status for work in works]
  assert set(ends[::2]) <= {'completed', 'cancelled', 'failed'}
  assert set(ends[1::2]) == {'completed'}
  assert all(len(desk.completions[work]) == 1 for work in works)


def test_staging_stays_within_its_budget_and_comes_back():
  part_bytes = LAYOUT.part_bytes(2, (0, 2))
  specs = [tiny_spec(name, staging_bytes=2 * part_bytes) for name in 'ac']
  with tiny_backend(*specs) as backend:
    desk = Desk(backend)
    ops = [
      op
      for i in range(20)
      for op in ops_of(
        DevicePages('a', (1 + 2 * i, 2 + 2 * i)),
        DevicePages('c', (1 + 2 * i, 2 + 2 * i)),
      )
    ]
    assert desk.transfer(*ops).op_status == ('completed',) * 40
    for instance in backend.instances.values():
      assert instance.staging.taken_bytes == 0
      assert instance.arrived.taken_bytes == 0
