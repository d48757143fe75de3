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
