# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own serve as they do in one process."""

from dataclasses import replace
from functools import partial
import importlib.util
import os
import signal
import time
from typing import Any
from typing import cast

import pytest

from engine_pieces import MODEL
from engine_pieces import tiny_params
from lifecycle import close
from lifecycle import COSTS
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed import commands as c
from mooncake_jax.distributed.spec import RaySpec
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.token import require_token
from mooncake_jax.distributed.worker import WorkerSpec
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.serve import serve
from scripts.device import instance_specs
from scripts.device import start_jax

# Not imported here: it is told of its token first.
pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
# Who gets which signal, after so many requests have finished.
AT = {3: [('decode0', signal.SIGKILL), ('prefill0', signal.SIGSTOP)]}
SMALL = replace(SPEC, prefill_instances=1, decode_instances=1)


@pytest.fixture(scope='module')
def backend():
  """One prefill and one decode instance, each in a process."""
  require_token()
  from mooncake_jax.distributed.backend import RayBackend

  instances = instance_specs(SMALL, MODEL)
  names = [instance.name for instance in instances]
  # Workers compile as little as this process does.
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
  workers = [
    WorkerSpec(
      MODEL,
      SMALL.layout(MODEL),
      instance,
      tuple(name for name in names if name != instance.name),
      tiny_params(),
      'float32',
      WireSpec('tcp', checksums=True),
      'secret',
      partial(start_jax, 1),
    )
    for instance in instances
  ]
  spec = RaySpec(silence_s=6.0)
  with RayBackend(SMALL.layout(MODEL), workers, spec) as made:
    yield made


@pytest.fixture
def cluster(backend):
  backend.restart_clock()
  return Cluster(SMALL, MODEL, backend, costs=COSTS)


def tokens_of(records) -> dict[str, tuple[int, ...]]:
  return {r.request_id: tuple(r.output_tokens) for r in records}


def in_one_process(requests) -> dict[str, tuple[int, ...]]:
  cluster = make_device(SMALL)
  records, _ = serve(requests, make_conductor(SMALL), cluster)
  close(cluster)
  return tokens_of(records)


def test_the_same_tokens_as_in_one_process(backend, cluster):
  requests = shared_prefix_requests(16, output=9, every_s=0.02)
  records, _ = serve(requests, make_conductor(SMALL), cluster)
  assert [r.outcome for r in records] == ['completed'] * 16
  assert tokens_of(records) == in_one_process(requests)
  assert any(r.reused_tokens for r in records)
  cluster.check()
  uses = backend.link_uses()
  handed = sum(r.num_prompt_tokens for r in requests)
  num_bytes = uses['wire', 'decode0'].num_bytes
  assert num_bytes >= handed * SMALL.layout(MODEL).token_layer_bytes * 3
  for r in records:
    times = [r.arrival_s, r.prefill_start_s, r.prefill_done_s, r.finished_s]
    assert times == sorted(times), r


def test_killed_and_silent_instances_are_missed_and_join_again(
  backend, cluster
):
  """Every request ends, with a reason if it must; later ones are served."""
  requests = shared_prefix_requests(40, output=30, every_s=0.2)
  seen, done = [], []

  def on_event(event):
    seen.append(event)
    if isinstance(event, Finished):
      done.append(event)
      for name, signal_number in AT.get(len(done), ()):
        os.kill(backend.crew.process_id(name), signal_number)
      begun_s = time.monotonic()
      backend.link_uses()  # waits for nobody, whoever is silent
      assert time.monotonic() - begun_s < 2.0

  records, _ = serve(
    requests, make_conductor(SMALL), cluster, on_event=on_event
  )
  lost = {e.instance: e.time_s for e in seen if isinstance(e, InstanceLost)}
  assert 'prefill0' in lost
  assert len(records) == 40
  assert {r.outcome for r in records} <= {'completed', 'failed', 'rejected'}
  later = [
    replace(request, request_id=f'later {request.request_id}')
    for request in shared_prefix_requests(4, output=9, seed=1)
  ]
  expected = in_one_process([*requests, *later])
  for record in records:
    if record.outcome == 'completed':
      assert tuple(record.output_tokens) == expected[record.request_id]
    else:
      assert record.reason, record
  until_s = backend.now_s() + 90
  while len({e.instance for e in seen if isinstance(e, InstanceJoined)}) < 2:
    seen += cluster.step(backend.now_s() + 1)
    assert backend.now_s() < until_s
  cluster.check()
  now_s = backend.now_s()
  later = [replace(request, arrival_s=now_s) for request in later]
  records, _ = serve(later, make_conductor(SMALL), cluster)
  assert [r.outcome for r in records] == ['completed'] * 4
  assert all(expected[name] == got for name, got in tokens_of(records).items())


def test_what_was_for_a_lost_process_does_not_reach_the_next(backend):
  """Which may be there before the driver has heard of either. The last test:
  the news are taken from the backend."""
  crew, no_op = backend.crew, cast(Any, None)
  before = crew._members['decode0']
  os.kill(crew.process_id('decode0'), signal.SIGKILL)
  until_s = time.monotonic() + 90
  while crew._members.get('decode0', before) is before:
    assert time.monotonic() < until_s
    time.sleep(0.05)
  crew.tell('decode0', [c.Transfer(-1, [no_op], 0, 1.0)])  # fails at once
  news, until_s = [], time.monotonic() + 2
  while time.monotonic() < until_s:
    news += crew.take(0.2)[0]
  kinds = [type(each).__name__ for name, each in news if name == 'decode0']
  assert kinds == ['Lost', 'Joined']
  crew.tell('decode0', [c.Transfer(-1, [no_op], 0, 1.0)])
  ((_, report),), _ = crew.take(30.0)
  assert [each.work_id for each in report.completions] == [-1]
