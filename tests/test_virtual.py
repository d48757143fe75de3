# SPDX-License-Identifier: Apache-2.0
"""The virtual backend: seconds by the costs, and deciders under failures."""

from dataclasses import replace

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.cluster import Cluster
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend


def _row(name, position, remaining):
  return DecodeRow(name, 0, None, position, (1,), remaining)


def _drain(backend):
  done = []
  while completions := backend.wait(None):
    done += completions
  return done


def test_chunks_of_an_instance_run_one_after_another():
  backend = VirtualBackend(COSTS, LAYERS)
  for start in (0, 10):
    backend.prefill('p', PrefillChunk('r', 0, start, start + 10, (1,)))
  backend.prefill('q', PrefillChunk('s', 0, 0, 10, (1,)))
  a, c, b = sorted(_drain(backend), key=lambda d: d.time_s)
  one = COSTS.prefill_s(10, 0)
  assert a.time_s == c.time_s == one
  assert (b.started_s, b.time_s) == (one, one + COSTS.prefill_s(10, 10))


def test_a_decode_work_is_the_sum_of_its_steps():
  backend = VirtualBackend(COSTS, LAYERS)
  rows = (_row('a', 9, 7), _row('b', 29, 20))
  backend.decode('d', DecodeBatch(rows), max_steps=100)
  (done,) = _drain(backend)
  steps = [COSTS.decode_step_s(2, 40 + 2 * i) for i in range(7)]
  assert done.time_s == pytest.approx(sum(steps))
  assert done.steps[0].segment.count == 7
  assert done.steps[0].segment.first_s == steps[0]
  assert done.steps[0].segment.last_s == pytest.approx(done.time_s)


@hypothesis.given(st.floats(0, 1.2))
def test_a_cancelled_decode_ends_at_the_next_step_boundary(share):
  backend = VirtualBackend(COSTS, LAYERS)
  batch = DecodeBatch((_row('a', 9, 10),))
  work = backend.decode('d', batch, max_steps=10)
  twin = VirtualBackend(COSTS, LAYERS)
  twin.decode('d', batch, max_steps=10)
  (whole,) = _drain(twin)
  cut_s = share * whole.time_s
  done = backend.wait(cut_s)
  backend.cancel(work)
  done += _drain(backend)
  assert len(done) == 1
  segment = done[0].steps[0].segment
  boundaries = [whole.steps[0].segment.token_s(i) for i in range(10)]
  due = [t for t in boundaries if t >= cut_s - 1e-12][:1] or boundaries[-1:]
  assert done[0].time_s == pytest.approx(due[0])
  assert segment.count == boundaries.index(due[0]) + 1


def test_a_transfer_past_its_deadline_times_out():
  backend = VirtualBackend(COSTS, LAYERS)
  op = TransferOp(DevicePages('p', (1,)), DevicePages('d', (1,)), 0, 2, 10**9)
  backend.transfer((op,), 1, deadline_s=0.5)
  (done,) = _drain(backend)
  assert (done.status, done.time_s, done.op_status) == (
    'timeout',
    0.5,
    ('timeout',),
  )


@pytest.mark.parametrize('end', ['timeout', 'cancelled'])
def test_what_arrived_before_a_transfers_early_end_is_there(end):
  """Each segment's bytes go by a link of its own, in order: 3 of 4, 1 of 2."""
  backend = VirtualBackend(COSTS, LAYERS)
  replicas = [Replica('p', i) for i in range(4)]
  replicas += [Replica('q', i) for i in range(2)]
  ops = [
    TransferOp(DevicePages(r.segment, (1,)), r, 0, 2, 10**8) for r in replicas
  ]
  ops[5] = ops[5]._replace(num_bytes=10**9)
  work = backend.transfer(ops, 2, 0.35 if end == 'timeout' else 9.0)
  done = backend.wait(0.35)
  if end == 'cancelled':
    backend.cancel(work)
    done = _drain(backend)
  there = [*['completed'] * 3, end, 'completed', end]
  assert [*done[0].op_status] == there
  reads = [op._replace(src=op.dst, dst=op.src) for op in ops]
  backend.transfer(reads, 0, 99.0)
  found = [status == 'completed' for status in _drain(backend)[0].op_status]
  assert found == [status == 'completed' for status in there]


def test_reading_what_was_dropped_fails():
  backend = VirtualBackend(COSTS, LAYERS)
  replica = Replica('p', 7)
  write = TransferOp(DevicePages('p', (1,)), replica, 0, 2, 10)
  read = TransferOp(replica, DevicePages('p', (2,)), 0, 2, 10)
  backend.transfer((write,), 2, 9.0)
  assert _drain(backend)[0].status == 'completed'
  backend.transfer((read, read._replace(start_layer=2, stop_layer=3)), 0, 9.0)
  assert _drain(backend)[0].op_status == ('completed', 'failed')
  backend.drop((replica,))
  backend.transfer((read,), 0, 9.0)
  assert _drain(backend)[0].op_status == ('failed',)


def test_wait_stops_the_clock_at_until():
  backend = VirtualBackend(COSTS, LAYERS)
  backend.prefill('p', PrefillChunk('r', 0, 0, 10, (1,)))
  assert backend.wait(1e-4) == []
  assert backend.now_s() == 1e-4
  assert len(backend.wait(9.0)) == 1
  assert backend.now_s() == COSTS.prefill_s(10, 0)


class _FlakyBackend(VirtualBackend):
  """Fails a share of all works, seeded."""

  def __init__(self, share, seed):
    super().__init__(COSTS, LAYERS, spoil=self._break)
    self._share, self._rng = share, np.random.default_rng(seed)

  def _break(self, completion):
    if self._rng.random() >= self._share:
      return completion
    status = str(self._rng.choice(['failed', 'timeout']))
    ops = tuple(
      status if self._rng.random() < 0.5 else s for s in completion.op_status
    )
    return replace(
      completion, status=status, error='spoilt', steps=(), op_status=ops
    )


@pytest.mark.parametrize('tiers', ['host', 'all'])
@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('share', [0.02, 0.3])
def test_failing_works_fail_requests_and_leak_nothing(share, seed, tiers):
  """Whatever fails, every request ends, for a reason, and all is free."""
  spec = replace(
    SPEC,
    prefill_pool_tokens=96,
    decode_pool_tokens=96,
    host_bytes=9 * 8 * 3 * 128,
    lease_s=0.02,
  )
  if tiers == 'all':
    spec = replace(
      spec, device_cache_tokens=40, ssd_bytes=20 * 8 * 3 * 128, promote_hits=1
    )
  cluster = Cluster(spec, MODEL, _FlakyBackend(share, seed))
  requests = shared_prefix_requests(25, every_s=0.002, seed=seed)
  records, _ = serve(
    requests,
    make_conductor(spec),
    cluster,
    on_event=lambda event: cluster.check(),
  )
  assert {r.outcome for r in records} <= {'completed', 'failed'}
  assert all(r.reason for r in records if r.outcome == 'failed')
  assert any(r.outcome == 'failed' for r in records) or share < 0.1
  assert cluster.idle
  cluster.check()
