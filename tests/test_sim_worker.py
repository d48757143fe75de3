# SPDX-License-Identifier: Apache-2.0
"""Simulated instances in processes of their own, at the pace of the clock."""

from contextlib import contextmanager
from dataclasses import replace
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time

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
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.blocks.segments import wire_segment
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.hands import DRIVER_SILENCE_S
from mooncake_jax.distributed.reports import gathered
from mooncake_jax.distributed.sim_worker import SimWorker
from mooncake_jax.distributed.sim_worker import SimWorkerSpec
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.serve import serve
from mooncake_jax.sim.paced import PacedBackend

LIMIT_S = 60.0
# Slow enough for what processes add to be little beside it.
SLOW = replace(
  COSTS,
  prefill_base_s=0.03,
  decode_base_s=0.01,
  handoff_bytes_per_s=5e5,
  copy_bytes_per_s=5e5,
)
NUM_BYTES = 10_000
CHUNK = PrefillChunk('r', 0, 0, 8, (1,))
# What `ray status` does: asks the cluster's head for its state.
LOOK = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))
"""
SHARED = replace(SPEC, host_bytes=1 << 16)


def spec(name: str) -> SimWorkerSpec:
  return SimWorkerSpec(name, SLOW, LAYERS, 0.0, WireSpec('tcp'), 'secret')


@pytest.fixture
def pair():
  """A prefill and a decode instance that know each other."""
  workers = {name: SimWorker(spec(name)) for name in ('p', 'd')}
  for name, worker in workers.items():
    other = 'd' if name == 'p' else 'p'
    worker.do(
      [
        c.RestartClock(worker.clock_s()),
        c.Lead(other, workers[other].address),
      ]
    )
  yield workers['p'], workers['d']
  for worker in workers.values():
    worker.close()


def ends(worker: SimWorker, *works: int) -> list:
  found, until_s = {}, time.monotonic() + LIMIT_S
  while {*works} - {*found}:
    assert time.monotonic() < until_s, found
    report = worker.report(1.0)
    assert not report.error, report.error
    found |= {each.work_id: each for each in report.completions}
  return [found[work] for work in works]


def legs(number: int) -> tuple[TransferOp, TransferOp]:
  """Both of a handoff from p to d."""
  src, dst = DevicePages('p', (1,)), DevicePages('d', (2,))
  out = Replica(wire_segment('d'), number, b'')
  come = Replica(ARRIVALS, number, b'')
  return (
    TransferOp(src, out, 0, 3, NUM_BYTES),
    TransferOp(come, dst, 0, 3, NUM_BYTES),
  )


def test_what_one_sends_ends_a_work_of_the_other(pair):
  """Once it is computed and has had its way; then what waits for it begins."""
  p, d = pair
  out, come = legs(7)
  p.do(
    [
      c.Prefill(1, CHUNK, ()),
      c.Transfer(2, [out], 0, 1e9, after=(1,)),
    ]
  )
  d.do(
    [
      c.Transfer(2, [come], 0, 1e9),
      c.Prefill(3, PrefillChunk('r', 0, 8, 12, (2,)), (2,)),
    ]
  )
  chunk, sent = ends(p, 1, 2)
  arrived, after = ends(d, 2, 3)
  least_s = SLOW.transfer_s(NUM_BYTES, 'handoff') / 3  # layers stream
  assert {e.status for e in (chunk, sent, arrived, after)} == {'completed'}
  assert sent.time_s >= chunk.time_s + least_s
  assert after.time_s >= sent.time_s + SLOW.prefill_s(4, 8)


def test_what_is_here_and_what_comes_make_one_work(pair):
  p, d = pair
  out, come = legs(7)
  here, pages = Replica('d', 1, b'k'), DevicePages('d', (3,))
  keep = TransferOp(pages, here, 0, 3, NUM_BYTES)
  read = TransferOp(here, pages, 0, 3, NUM_BYTES)
  d.do([c.Transfer(1, [keep], 0, 1e9)])
  ends(d, 1)
  d.do(
    [
      c.Transfer(2, [read, come], 0, 1e9),
      c.Transfer(3, [read, legs(8)[1]], 0, 1e9),
      c.Cancel(3),
    ]
  )
  p.do([c.Transfer(2, [out], 0, 1e9)])
  both, cancelled = ends(d, 2, 3)
  assert (both.status, cancelled.status) == ('completed', 'cancelled')
  assert both.time_s >= ends(p, 2)[0].time_s
  assert not d.holdings().num_works and not d.backend._works


def test_it_may_come_early_late_or_never(pair):
  p, d = pair
  early, late, never = (legs(number) for number in (1, 2, 3))
  p.do([c.Transfer(1, [early[0]], 0, 1e9)])
  ends(p, 1)
  time.sleep(0.1)
  now_s = d.clock_s() - p._start_s
  d.do(
    [
      c.Transfer(1, [early[1]], 0, 1e9),
      c.Transfer(2, [late[1]], 0, now_s + 0.1),
      c.Transfer(3, [never[1]], 0, 1e9),
      c.Transfer(4, [legs(4)[1]], 0, 1e9),
      c.Cancel(4),
      c.Miss((3,), 'p: failed'),
    ]
  )
  statuses = [each.status for each in ends(d, 1, 2, 3, 4)]
  assert statuses == ['completed', 'timeout', 'failed', 'cancelled']
  p.do([c.Transfer(2, [late[0]], 0, 1e9), c.Lead('d', None)])
  p.do([c.Transfer(5, [legs(5)[0]], 0, 1e9)])
  assert [each.status for each in ends(p, 5)] == ['failed']


def test_tokens_may_wait_for_more_of_them_and_no_end_does(pair):
  _, d = pair
  row = DecodeRow('r', 0, None, 8, (1, 2), 60)
  d.do([c.Decode(1, DecodeBatch((row,)), 60)])
  told = [*d.report(5.0).completions]
  begun_s = time.monotonic()
  told += d.report(5.0, gather_s=0.2).completions
  assert told[-1].done or time.monotonic() >= begun_s + 0.2
  told += () if told[-1].done else d.report(5.0, gather_s=60.0).completions
  assert told[-1].done and time.monotonic() < begun_s + 30
  counts = [e.segment.count for each in told for e in each.steps]
  assert sum(counts) == 60


def test_those_of_one_process_tell_together():
  changed = threading.Condition()
  hands = [SimWorker(spec(name), changed) for name in 'ab']
  a = hands[0]
  a.do([c.RestartClock(a.clock_s()), c.Prefill(1, CHUNK, ())])
  first = gathered(hands, 30.0, '', 0.0)
  assert [*first] == ['a'] and first['a'].completions[0].work_id == 1
  begun_s = time.monotonic()
  assert {*gathered(hands, 0.2, '', 0.0)} == {'a', 'b'}  # nobody has news
  assert time.monotonic() >= begun_s + 0.2
  assert gathered(hands, 30.0, 'another', 0.0)['b'].is_refused
  for each in hands:
    each.close()


def test_a_driver_that_commands_before_it_listens_is_no_silent_one(pair):
  """As one does whose other instances took long to start."""
  p, _ = pair
  p._heard_s -= 2 * DRIVER_SILENCE_S
  p.do([c.Prefill(1, CHUNK, ())], '')
  assert ends(p, 1)[0].status == 'completed'


def test_only_what_computes_nothing_shares_a_process():
  with pytest.raises(ValueError, match='instances_per_process=2 must be 1'):
    RaySpec(instances_per_process=2)


def test_who_does_not_know_the_secret_is_hung_up_on(pair):
  _, d = pair
  d.do([c.Transfer(1, [legs(9)[1]], 0, 1e9)])
  for message in ({'numbers': [9]}, {'secret': 'no', 'numbers': [9]}):
    channel = Channel(socket.create_connection(d.address, 5), 5)
    channel.send(message)
    with pytest.raises(OSError):
      channel.receive()
    channel.close()
  assert not d.report(0.1).completions


def seconds(records) -> float:
  """That the requests took, all together."""
  return sum((r.finished_s or 0.0) - r.arrival_s for r in records)


@contextmanager
def processes(cluster):
  require_token()
  from mooncake_jax.distributed.backend import RayBackend

  names = (*cluster.prefill_names, *cluster.decode_names)
  ray = RaySpec(
    num_cpus=0.5, silence_s=10.0, simulated=True, instances_per_process=2
  )
  workers = [spec(name) for name in names]
  with RayBackend(cluster.layout(MODEL), workers, ray) as backend:
    yield backend


def check_who_is_let_in() -> None:
  """Of Ray's servers, which listen on all interfaces: who has the token."""
  import ray

  address = ray.get_runtime_context().gcs_address
  wrong = 'f' * len(os.environ['RAY_AUTH_TOKEN'])
  for token, is_let_in in (
    (os.environ['RAY_AUTH_TOKEN'], True),
    (wrong, False),
  ):
    done = subprocess.run(
      [sys.executable, '-c', LOOK, address],
      env={**os.environ, 'RAY_AUTH_TOKEN': token},
      capture_output=True,
      text=True,
      timeout=LIMIT_S,
    )
    assert (done.returncode == 0) == is_let_in, done.stderr
    assert is_let_in or 'token' in done.stderr, done.stderr


@pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
def test_a_cluster_of_them_takes_the_time_of_one_simulation():
  requests = shared_prefix_requests(12, output=12, every_s=0.1)
  alone = Cluster(SHARED, MODEL, PacedBackend(SLOW, LAYERS), costs=SLOW)
  expected, _ = serve(requests, make_conductor(SHARED), alone)
  with processes(SHARED) as backend:
    cluster = Cluster(SHARED, MODEL, backend, costs=SLOW)
    records, _ = serve(requests, make_conductor(SHARED), cluster)
    cluster.check()
    assert [r.outcome for r in records] == ['completed'] * 12
    assert [r.num_output_tokens for r in records] == [12] * 12
    assert any(sum(r.reused_tokens.values()) for r in records)
    assert seconds(records) >= 0.8 * seconds(expected)
    told, now_s = [], backend.now_s()
    check_who_is_let_in()
    killer = threading.Timer(
      0.3, lambda: os.kill(backend.crew.process_ids['decode0'], signal.SIGKILL)
    )
    killer.start()
    again = [replace(r, arrival_s=r.arrival_s + now_s) for r in requests]
    records, _ = serve(
      again, make_conductor(SHARED), cluster, on_event=told.append
    )
    killer.join()
    assert len(records) == 12
    assert {r.outcome for r in records} <= {'completed', 'failed'}
    while len([e for e in told if isinstance(e, InstanceJoined)]) < 2:
      told += cluster.step(backend.now_s() + 0.5)
      assert backend.now_s() < now_s + LIMIT_S
    lost = [e.instance for e in told if isinstance(e, InstanceLost)]
    assert lost == ['prefill0', 'decode0']  # which share the process
    with pytest.raises(ValueError, match='decode0 shares its process with 1'):
      backend.dismiss('decode0')
    cluster.check()
