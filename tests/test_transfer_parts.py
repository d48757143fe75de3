# SPDX-License-Identifier: Apache-2.0
"""The parts of a transfer alone: links, budgets, segments, heads, book."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.budget import ByteBudget
from mooncake_jax.transfer.heads import overlapping
from mooncake_jax.transfer.links import Link
from mooncake_jax.transfer.links import Move
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.op_run import TransferWork
from mooncake_jax.transfer.page_copies import split_pages
from mooncake_jax.transfer.segment import HostSegment
from mooncake_jax.transfer.segment import Part


def test_lower_priority_moves_first_and_arrivals_keep_their_order():
  device = jax.devices()[0]
  target = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
  started, done, order = threading.Event(), threading.Event(), []

  def move(name, begin=lambda: True):
    def arrived(arrays):
      order.append(name)
      if len(order) == 5:
        done.set()

    array = jax.device_put(np.zeros(4, np.float32), device)
    return Move((array,), (target,), begin, arrived, order.append)

  def hold():
    started.wait()
    return True

  link = Link('link', on_crash=lambda name, error: order.append(error))
  link.submit(move('first', hold), 0)
  for name, priority in (('d', 2), ('b', 1), ('a', 0), ('c', 1)):
    link.submit(move(name), priority)
  started.set()
  assert done.wait(30)
  link.close()
  assert order == ['first', 'a', 'b', 'c', 'd']


def test_one_bad_move_of_a_batch_fails_alone():
  device = jax.devices()[0]
  target = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
  arrays = [jax.device_put(np.zeros(4, np.float32), device) for _ in range(3)]
  arrays[1].delete()
  ends, done, go = {}, threading.Event(), threading.Event()

  def end(i, what):
    ends[i] = what
    if len(ends) == 4:
      done.set()

  def move(i, array, begin=lambda: True):
    return Move(
      (array,),
      (target,),
      begin,
      lambda arrays: end(i, 'arrived'),
      lambda error: end(i, 'failed'),
    )

  link = Link('link', on_crash=lambda name, error: end(9, error))
  first = jax.device_put(np.zeros(4, np.float32), device)
  link.submit(move(3, first, lambda: go.wait(30)), 0)
  for i, array in enumerate(arrays):
    link.submit(move(i, array), 0)
  go.set()
  assert done.wait(30)
  link.close()
  assert ends == {0: 'arrived', 1: 'failed', 2: 'arrived', 3: 'arrived'}


def test_a_paced_link_delivers_no_faster():
  device = jax.devices()[0]
  target = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
  times, done = [], threading.Event()

  def arrived(arrays):
    times.append(time.perf_counter())
    if len(times) == 3:
      done.set()

  link = Link('link', on_crash=lambda name, error: done.set())
  link.pace(4000 / 0.05)
  start_s = time.perf_counter()
  for _ in range(3):
    array = jax.device_put(np.zeros(1000, np.float32), device)
    link.submit(Move((array,), (target,), lambda: True, arrived, print), 0)
  assert done.wait(30)
  link.close()
  due = [start_s + 0.05 * i for i in (1, 2, 3)]
  assert all(at_s >= due_s for at_s, due_s in zip(times, due, strict=True))


def test_a_link_that_waits_for_its_receiver_is_not_busy():
  """Else whatever comes before a slow consumer looks saturated."""
  num_bytes, device = 1 << 10, jax.devices()[0]
  budget, arrived = ByteBudget(num_bytes), threading.Semaphore(0)
  link = Link('link', lambda name, error: None, budget)
  place = jax.sharding.SingleDeviceSharding(device)
  move = Move(
    (np.zeros(num_bytes, np.uint8),),
    (place,),
    lambda: True,
    lambda arrays: arrived.release(),
    lambda error: None,
  )
  for _ in range(2):
    link.submit(move, 0)
    # Each by itself: two that wait together go together.
    time.sleep(0.1)
  assert arrived.acquire(timeout=30) and not arrived.acquire(timeout=0.4)
  budget.give(num_bytes)
  assert arrived.acquire(timeout=30)
  link.close()
  assert link.count.num_moves == 2 and 0 < link.count.busy_s < 0.4


def test_a_budget_lets_too_much_through_alone_and_ends_waits_when_closed():
  budget = ByteBudget(10)
  assert budget.try_take(25)
  assert not budget.try_take(1)
  taken = []
  waiting = threading.Thread(target=lambda: taken.append(budget.take(5)))
  waiting.start()
  budget.give(25)
  waiting.join(30)
  assert taken == [True] and budget.taken_bytes == 5
  assert not budget.take(6, timeout_s=0.01)
  waiting = threading.Thread(target=lambda: taken.append(budget.take(6)))
  waiting.start()
  budget.close()
  waiting.join(30)
  assert taken == [True, False]


def test_a_segment_counts_bytes_and_refuses_a_part_twice():
  slices = (jax.numpy.zeros((2, 2, 8, 2, 8)),)
  segment = HostSegment('a', 10 * slices[0].nbytes)
  segment.put(1, Part(0, 2, slices))
  with pytest.raises(ValueError, match='there already'):
    segment.put(1, Part(1, 3, slices))
  segment.put(1, Part(2, 4, slices))
  assert segment.used_bytes == 2 * slices[0].nbytes
  assert [p.start_layer for p in segment.read(1, 1, 3)] == [0, 2]
  with pytest.raises(LookupError, match='layer 4'):
    segment.read(1, 0, 5)
  segment.drop([1, 7])
  assert segment.used_bytes == 0 and not segment.replica_ids


@pytest.mark.parametrize('num_source', [1, 2, 3, 4, 6])
@pytest.mark.parametrize('num_target', [1, 2, 3, 4, 6])
def test_overlapping_slices_cover_exactly_the_heads_of_a_target(
  num_source, num_target
):
  heads = 12
  for target in range(num_target):
    wanted = set(
      range(target * heads // num_target, (target + 1) * heads // num_target)
    )
    for i in range(num_source):
      held = set(range(i * heads // num_source, (i + 1) * heads // num_source))
      used = i in overlapping(num_source, num_target, target)
      assert used == bool(wanted & held)


@pytest.mark.parametrize('num_pages', [0, 1, 2, 7, 8, 9, 23])
def test_runs_of_pages_cover_all_in_order(num_pages):
  runs = split_pages(num_pages, (1, 2, 8))
  pages = list(range(num_pages))
  assert [page for run in runs for page in pages[run]] == pages
  assert all(run.stop - run.start in (1, 2, 8) for run in runs)


def entered(work: TransferWork, ops: list[TransferOp]) -> TransferWork:
  work.runs = tuple(OpRun(op, work) for op in ops)
  return work


def test_no_op_ends_twice_however_its_ends_race():
  ended, started = [], []
  book = TransferBook(lambda: 0.0, started.extend, ended.append)
  work = TransferWork(0, 0, 1.0)
  op = TransferOp(DevicePages('a', (1,)), Replica('a', 1), 0, 3, 1)
  book.add(entered(work, [op]))
  [run] = started
  assert isinstance(run, OpRun) and book.begin(run)
  run.num_pieces = 1
  threads = [
    threading.Thread(target=book.end, args=(run, status))
    for status in ('failed', 'timeout', 'cancelled') * 5
  ]
  threads.append(threading.Thread(target=book.piece_arrived, args=(run, 1)))
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert ended == [work] and not run.is_live
  assert not book.begin(run)
  assert book.next_deadline_s() is None


PLACES = [
  DevicePages('a', (1, 2)),
  DevicePages('a', (2, 3)),
  DevicePages('b', (1,)),
  Replica('a', 1),
  Replica('b', 2),
]
OPS = st.builds(
  lambda src, dst, layers: TransferOp(src, dst, layers[0], layers[1], 1),
  st.sampled_from(PLACES),
  st.sampled_from(PLACES),
  st.sampled_from([(0, 2), (2, 3), (0, 3)]),
)


def touch(a: DevicePages | Replica, b: DevicePages | Replica) -> bool:
  if isinstance(a, Replica) or isinstance(b, Replica):
    return a == b
  return a.instance == b.instance and bool({*a.pages} & {*b.pages})


def writes_what_it_needs(earlier: TransferOp, op: TransferOp) -> bool:
  layers = earlier.start_layer < op.stop_layer
  layers &= op.start_layer < earlier.stop_layer
  return layers and (touch(earlier.dst, op.src) or touch(earlier.dst, op.dst))


@given(
  works=st.lists(st.lists(OPS, min_size=1, max_size=3), max_size=6),
  data=st.data(),
)
def test_ops_start_after_the_writers_before_them_and_end_once(works, data):
  started: list[OpRun] = []
  ended: list[TransferWork] = []
  book = TransferBook(lambda: 0.0, started.extend, ended.append)
  all_works = [
    entered(TransferWork(i, 0, 1.0), ops) for i, ops in enumerate(works)
  ]
  for work in all_works:
    book.add(work)
  runs = [run for work in all_works for run in work.runs]
  while any(run.is_live for run in runs):
    live = [run for run in started if run.is_live]
    assert live, 'ops wait for each other'
    run = data.draw(st.sampled_from(live))
    earlier = runs[: runs.index(run)]
    waits_for = [e for e in earlier if writes_what_it_needs(e.op, run.op)]
    assert not any(e.is_live for e in waits_for)
    book.end(run, data.draw(st.sampled_from(['completed', 'failed'])))
  assert len(set(started)) == len(started)
  assert sorted(w.work_id for w in ended) == list(range(len(works)))
  for i, run in enumerate(runs):
    reads = [
      e
      for e in runs[:i]
      if writes_what_it_needs(e.op, run.op) and touch(e.op.dst, run.op.src)
    ]
    if run not in started:
      assert run.status == 'failed'
      assert any(e.status == 'failed' for e in reads)
  assert not book._writers and book.next_deadline_s() is None
