# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own serve as they do in one process.

And whichever of them is killed, stopped or slow, at whatever moment: every
request ends, with the right tokens or a reason, and nobody else keeps
anything of what was under way.
"""

import importlib.util
import signal
import threading
import time
from typing import Any
from typing import cast

import numpy as np
import pytest

from engine_pieces import MODEL
from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed import commands as c
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import TokensEmitted
from mooncake_jax.events import WorkDone
from ray_pieces import lost
from ray_pieces import one_process
from ray_pieces import ray_cluster
from ray_pieces import send
from ray_pieces import serve_watched
from ray_pieces import settle
from ray_pieces import tokens_of
from ray_pieces import Watch
from scripts.serving import devices_of

# Not imported here: it is told of its token first.
pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
STOP, CONTINUE, KILL = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL


@pytest.fixture(scope='module')
def backend(expected):
  """Two prefill and two decode instances, each in a process.

  They find their programs compiled, by the process that they are held against.
  """
  with ray_cluster() as made:
    yield made


@pytest.fixture(scope='module')
def cluster(backend):
  return Cluster(SPEC, MODEL, backend, costs=COSTS)


@pytest.fixture(scope='module')
def expected():
  with one_process() as tokens:
    yield tokens


def long_requests(count, prompt=110, output=8, every_s=0.0):
  rng = np.random.default_rng(prompt)
  return [
    make_request(
      f'r{i}',
      rng.integers(2, MODEL.vocab_size, prompt - i),
      output,
      every_s * i,
    )
    for i in range(count)
  ]


def check(records, requests, expected, completed=None) -> None:
  """All ended, with the tokens of one process or with a reason."""
  assert len(records) == len(requests)
  right = expected(requests)
  for record in records:
    if record.outcome == 'completed':
      assert tuple(record.output_tokens) == right[record.request_id], record
    else:
      assert record.outcome == 'failed' and record.reason, record
  if completed is not None:
    assert sum(r.outcome == 'completed' for r in records) >= completed, records


def test_the_same_tokens_as_in_one_process(backend, cluster, expected):
  requests = shared_prefix_requests(16, output=9, every_s=0.02)
  records = serve_watched(requests, cluster, Watch())
  assert [r.outcome for r in records] == ['completed'] * 16
  assert tokens_of(records) == expected(requests)
  assert any(r.reused_tokens for r in records)
  uses = backend.link_uses()
  handed = sum(r.num_prompt_tokens for r in requests)
  num_bytes = sum(uses['wire', f'decode{i}'].num_bytes for i in range(2))
  assert num_bytes >= handed * SPEC.layout(MODEL).token_layer_bytes * 3
  for r in records:
    times = [r.arrival_s, r.prefill_start_s, r.prefill_done_s, r.finished_s]
    assert times == sorted(times), r


def test_a_run_says_what_all_its_processes_computed_on(backend):
  """The driver's own devices would be a login node's."""
  devices = devices_of(backend)
  assert len(devices) == len(backend.crew.addresses)
  assert {device.platform for device in devices} == {'cpu'}


def test_the_ways_between_instances_are_measured(backend):
  count = len(backend.crew.addresses)
  from mooncake_jax.distributed.link_speeds import measure_ways

  speeds = measure_ways(backend.crew)
  assert len(speeds) == count * (count - 1)
  for speed in speeds:
    assert 1e5 < speed.bytes_per_s < 1e11 and 0 <= speed.latency_s < 1


def test_a_prefill_instance_killed_with_one_under_way_and_others_queued(
  backend, cluster, expected
):
  """Those are prefilled by the other; the process that follows serves."""
  requests, victim = long_requests(12), 'prefill0'

  def on_event(watch, event):
    if not isinstance(event, WorkDone) or event.instance != victim:
      return False
    send(backend, victim, KILL)
    return True

  watch = Watch(on_event)
  records = serve_watched(requests, cluster, watch)
  check(records, requests, expected, completed=12)
  assert lost(watch) == {victim}
  again = {e.request_id for e in watch.of(Failed)}
  first = [e for e in watch.of(WorkDone) if e.instance == victim]
  begun = {e.request_id for e in first if e.time_s <= watch.acted_s}
  assert again & begun and again - begun  # in prefill, and queued
  assert all(watch.placed[i, 1].prefill == 'prefill1' for i in again)
  records = serve_watched(long_requests(4, 100), cluster, watch := Watch())
  assert all(r.outcome == 'completed' for r in records) and not lost(watch)
  assert victim in {d.prefill for d in watch.placed.values()}


@pytest.mark.parametrize('victim', ['prefill', 'decode'])
def test_either_end_of_a_transfer_killed(backend, cluster, expected, victim):
  """Its target takes nothing while it is stopped, so it is under way.

  Unless all has come before the target stops: then once more.
  """
  assert any(
    transfer_is_killed(backend, cluster, expected, victim, prompt)
    for prompt in (110, 108, 106)
  )


def transfer_is_killed(backend, cluster, expected, victim, prompt) -> bool:
  """Whether it was under way; all end right in any case."""
  requests, names = long_requests(6, prompt), []

  def on_event(watch, event):
    if isinstance(event, WorkDone) and not names:
      decision = watch.placed[event.request_id, 0]
      names[:] = decision.prefill, decision.decode, event.request_id
      send(backend, decision.decode, STOP)
    if not isinstance(event, PrefillDone) or event.request_id not in names:
      return False
    send(backend, names[victim == 'decode'], KILL)
    if victim == 'prefill':
      send(backend, names[1], CONTINUE)
    return True

  watch = Watch(on_event)
  records = serve_watched(requests, cluster, watch)
  assert watch.acted_s is not None
  check(records, requests, expected, completed=6)
  assert lost(watch) == {names[victim == 'decode']}
  return names[2] in {e.request_id for e in watch.of(Failed)}


def test_a_decode_instance_killed_while_it_decodes(backend, cluster, expected):
  requests = long_requests(6, prompt=40, output=60)

  def on_event(watch, event):
    if not isinstance(event, TokensEmitted) or event.instance != 'decode1':
      return False
    if event.emitted.segment.count < 2 and len(watch.of(TokensEmitted)) < 12:
      return False
    send(backend, 'decode1', KILL)
    return True

  watch = Watch(on_event)
  records = serve_watched(requests, cluster, watch)
  check(records, requests, expected, completed=6)
  assert lost(watch) == {'decode1'}
  assert watch.of(Failed)


def test_a_slow_instance_is_waited_for_and_its_late_news_are_dropped(
  backend, cluster, expected
):
  """Stopped for less than `silence_s`; one of its requests is given up."""
  requests, cancelled = long_requests(8, every_s=0.05), []

  def on_event(watch, event):
    if not isinstance(event, WorkDone) or event.instance != 'prefill0':
      return False
    send(backend, 'prefill0', STOP)
    timer = threading.Timer(2.0, send, (backend, 'prefill0', CONTINUE))
    timer.start()
    cluster.cancel(event.request_id)
    cancelled.append(event.request_id)
    return True

  watch = Watch(on_event)
  records = serve_watched(requests, cluster, watch)
  assert not lost(watch) and watch.acted_s is not None
  ends = {r.request_id: r for r in records}
  assert ends.pop(cancelled[0]).outcome == 'cancelled'
  rest = [r for r in requests if r.request_id in ends]
  check([*ends.values()], rest, expected, completed=7)


def test_killed_and_silent_instances_are_missed_and_join_again(
  backend, cluster, expected
):
  """Two at once; who asks what links carry waits for neither."""
  requests = shared_prefix_requests(40, output=30, every_s=0.1)

  def on_event(watch, event):
    if not isinstance(event, Finished) or len(watch.of(Finished)) < 3:
      return False
    send(backend, 'decode0', KILL)
    send(backend, 'prefill0', STOP)
    begun_s = time.monotonic()
    backend.link_uses()
    assert time.monotonic() - begun_s < 2.0
    return True

  watch = Watch(on_event)
  records = serve_watched(requests, cluster, watch)
  check(records, requests, expected)
  assert 'decode0' in lost(watch)


def test_what_a_work_waits_elsewhere_puts_its_deadline_off(backend, cluster):
  """A put of decode pages after a chunk on a prefill instance that is slow."""
  tokens = np.zeros(8, np.int32)
  chunk = PrefillChunk('x', 0, 0, 8, (1, 2), tokens)
  size = 8 * SPEC.layout(MODEL).token_layer_bytes * 3
  op = TransferOp(
    DevicePages('decode0', (1, 2)),
    Replica('prefill1', 1 << 40, b'x'),
    0,
    3,
    size,
  )
  send(backend, 'prefill0', STOP)
  before = backend.prefill('prefill0', chunk)
  put = backend.transfer([op], 0, backend.now_s() + 0.5, (before,))
  backend.wait(backend.now_s() + 1.0)
  send(backend, 'prefill0', CONTINUE)
  ends = {}
  while put not in ends:
    ends |= {each.work_id: each for each in backend.wait(backend.now_s() + 9)}
  assert ends[put].status == 'completed', ends
  backend.drop((op.dst,))
  settle(cluster)


def test_a_driver_that_slept_takes_nobody_for_silent(backend, cluster):
  crew = backend.crew
  with crew._changed:
    for member in crew._members.values():
      member.heard_s -= 60
    crew._looked_s -= 60
  news, until_s = [], time.monotonic() + 1.5
  while time.monotonic() < until_s:
    news += crew.take(0.2)[0]
  assert not news
  settle(cluster)


def test_what_was_for_a_lost_process_does_not_reach_the_next(backend, cluster):
  """Which may be there before the driver has heard of either."""
  crew, no_op = backend.crew, cast(Any, None)
  before = crew._members['decode0']
  send(backend, 'decode0', KILL)
  until_s = time.monotonic() + 90
  while crew._members.get('decode0', before) is before:
    assert time.monotonic() < until_s
    time.sleep(0.05)
  crew.tell({'decode0': [c.Transfer(-1, [no_op], 0, 1.0)]})  # fails at once
  news, until_s = [], time.monotonic() + 2
  while time.monotonic() < until_s:
    news += crew.take(0.2)[0]
  kinds = [type(each).__name__ for name, each in news if name == 'decode0']
  assert kinds == ['Lost', 'Joined']
  crew.tell({'decode0': [c.Transfer(-1, [no_op], 0, 1.0)]})
  ((_, report),), _ = crew.take(30.0)
  assert [each.work_id for each in report.completions] == [-1]
  for name, each in news:
    backend._hear(name, each)
  settle(cluster)
