# SPDX-License-Identifier: Apache-2.0
"""A worker in this process: what it makes of commands and what it reports."""

import time
from typing import Any

import pytest

from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import tiny_params
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed import hands
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.worker import Worker
from mooncake_jax.distributed.worker import WorkerSpec


@pytest.fixture(scope='module')
def worker():
  spec = WorkerSpec(
    MODEL,
    LAYOUT,
    tiny_spec('p0'),
    ('d0',),
    tiny_params(),
    'float32',
    WireSpec('tcp'),
    'secret',
  )
  made = Worker(spec, 'p0')
  yield made
  made.close()


def reported(worker: Worker, count: int) -> c.Report:
  """The report in which the last of so many completions came."""
  found, until_s = [], time.monotonic() + 30
  while len(found) < count:
    assert time.monotonic() < until_s
    report = worker.report(1.0)
    found += report.completions
  report.completions = found
  return report


def to_host(work_id: int, replica_id: int) -> c.Transfer:
  num_bytes = LAYOUT.block_size_tokens * LAYOUT.token_layer_bytes * 3
  pages, replica = DevicePages('p0', (1, 2)), Replica('p0', replica_id, b'k')
  op = TransferOp(pages, replica, 0, 3, num_bytes)
  return c.Transfer(work_id, [op], 0, time.perf_counter() + 30)


def test_reports_tell_what_links_carried_in_this_run(worker):
  for start_s in (1.0, 2.0):  # a new run counts from 0
    worker.do([c.RestartClock(start_s), to_host(int(start_s), int(start_s))])
    report = reported(worker, 1)
    assert [each.status for each in report.completions] == ['completed']
    (op,) = to_host(0, 0).ops
    later = worker.report(0.1)  # a link counts once it has handed over
    assert later.start_s == start_s
    assert later.link_uses['into_host', 'p0'].num_bytes == op.num_bytes


def test_what_waits_for_a_work_that_could_not_start_fails_too(worker):
  """And what others still send it is refused, so that it takes no room."""
  out, come = to_host(20, 20), to_host(30, 30)
  (op,) = come.ops
  come.ops = [op._replace(src=Replica(ARRIVALS, 77, b''))]
  for each in (out, come):
    each.after, each.deadline_s = (10,), worker.clock_s() + 1
  no_op: Any = None
  worker.do([c.Transfer(10, [no_op], 0, 1.0), out, come])
  ends = {each.work_id: each for each in reported(worker, 3).completions}
  assert {each.status for each in ends.values()} == {'failed'}
  assert 'work 10' in ends[20].error
  assert not worker.arrivals.wants(77)


def key_of(work_id: int) -> bytes:
  return b'k%d' % work_id


def put(work_id: int) -> c.Transfer:
  """Stores a block of its own."""
  found = to_host(work_id, work_id)
  (op,) = found.ops
  replica = Replica('p0', work_id, key_of(work_id))
  found.ops = [op._replace(dst=replica)]
  return found


def read(replica: Replica) -> c.Transfer:
  found = to_host(500, 0)
  (op,) = found.ops
  found.ops = [op._replace(src=replica, dst=op.src)]
  return found


def test_a_driver_leaves_what_it_published_and_nothing_else(worker):
  others = tuple(Replica('p0', i, b'k') for i in (1, 2))
  worker.do([c.Forget(others), c.RestartClock(1.0), put(100), put(101)])
  published = reported(worker, 2)
  worker.do([c.Heard(published.number), put(102)])
  reported(worker, 1)  # judged by nobody
  worker.take_over('next', 10.0)
  assert worker.report(0.0).is_refused
  left = dict(worker.adopt('p0'))
  assert left == {key_of(i): LAYOUT.block_bytes for i in (100, 101)}
  held = worker.holdings()
  assert held.segment_bytes['p0'] == 2 * LAYOUT.block_bytes
  # Read under the number that the next driver's Master gives; or written anew.
  again = put(7)
  again.ops = [again.ops[0]._replace(dst=Replica('p0', 7, key_of(101)))]
  commands = [c.RestartClock(1.0), read(Replica('p0', 3, key_of(100))), again]
  worker.do([put(103)], 'old')  # of the driver that is no more
  worker.do(commands, 'next')
  ends: list[Any] = []
  until_s = time.monotonic() + 30
  while len(ends) < 2:
    assert time.monotonic() < until_s
    ends += worker.report(1.0, 'next').completions
  assert [each.status for each in ends] == ['completed'] * 2, ends
  assert worker.holdings().segment_bytes['p0'] == 2 * LAYOUT.block_bytes
  worker.take_over('', 10.0)
  assert worker.holdings().segment_bytes['p0'] == LAYOUT.block_bytes


@pytest.mark.parametrize('is_silent', [True, False])
def test_works_of_a_driver_that_is_no_more_end(worker, monkeypatch, is_silent):
  number = 78 + is_silent
  come = to_host(200, 200)
  (op,) = come.ops
  come.ops = [op._replace(src=Replica(ARRIVALS, number, b''), dst=op.src)]
  worker.do([c.RestartClock(1.0), come])
  until_s = time.monotonic() + 30
  while not worker.holdings().num_works:
    assert time.monotonic() < until_s
    time.sleep(0.01)
  if is_silent:
    monkeypatch.setattr(hands, 'DRIVER_SILENCE_S', 0.0)
    (end,) = reported(worker, 1).completions
    assert end.status != 'completed' and 'said nothing' in end.error
  else:
    worker.take_over('', 10.0)
    assert not worker.report(0.0).completions
  assert not worker.holdings().num_works
  assert not worker.arrivals.wants(number)
