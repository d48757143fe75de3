# SPDX-License-Identifier: Apache-2.0
"""Each state a request can wait in has a deadline, and a cancel frees it."""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

import numpy as np
import pytest

from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import RequestEvent
from mooncake_jax.request import Placement

LONG_S, TIMEOUT_S = 9.0, 2.0
ONE = replace(
  SPEC, prefill_instances=1, decode_instances=1, request_timeout_s=TIMEOUT_S
)
PROMPT = np.arange(41) * 7 % 50 + 2


@dataclass(frozen=True)
class Case:
  """How a request comes to wait in a state for seconds.

  Attributes:
    costs, spec: what differs from the usual ones.
    is_stored: whether its prompt is in the store.
    num_others: requests that were there before it, and end after it.
    free_s: until what touches its pages at a cancel ends by itself; a decode
      step besides.
  """

  costs: dict[str, float] = field(default_factory=dict)
  spec: dict[str, object] = field(default_factory=dict)
  is_stored: bool = False
  num_others: int = 0
  free_s: float = 0.0


CASES = {
  'queued': Case(
    {'prefill_base_s': LONG_S}, {'prefill_pool_tokens': 96}, num_others=3
  ),
  # What has begun on a link or a stage of the simulator goes on to its end.
  'fetching': Case({'onload_latency_s': LONG_S}, is_stored=True, free_s=LONG_S),
  'prefilling': Case({'prefill_base_s': LONG_S}, free_s=LONG_S),
  'transferring': Case(
    {'handoff_latency_s': LONG_S},
    {'streaming': 'prompt', 'chunk_tokens': 64},
    free_s=LONG_S,
  ),
  'decoding': Case({'decode_base_s': LONG_S}, free_s=LONG_S),
  'preempted': Case(
    {'copy_latency_s': LONG_S},  # a put to the other's host
    {'decode_reserve': 'prompt', 'decode_pool_tokens': 96},
    num_others=2,
    free_s=LONG_S,
  ),
}


def waiting(state: str) -> tuple[Cluster, str, float]:
  """A cluster in which a request waits in the state; its name and arrival."""
  case = CASES[state]
  spec = replace(ONE, max_tokens=96, **case.spec)
  cluster = make_virtual(spec, replace(COSTS, **case.costs))
  if case.is_stored:
    submit(cluster, 'first')
    run_out(cluster)
  for i in range(case.num_others):
    submit(cluster, f'other{i}', PROMPT[:20] + i, 5.0 * (state == 'queued'))
  prompt = PROMPT if state != 'preempted' else PROMPT[:20]
  submit(cluster, 'z', prompt)
  arrival_s = cluster.backend.now_s()
  while (run := run_of(cluster)).state != state:
    assert cluster.backend.now_s() < arrival_s + TIMEOUT_S / 2, run.state
    cluster.step(arrival_s + TIMEOUT_S / 2)
    cluster.check()
  assert run.key == ('z', 0)
  return cluster, 'z', arrival_s


def run_of(cluster, name='z'):
  return cluster._flow.runs[name, 0]


def submit(cluster, name, prompt=PROMPT, later_s=0.0):
  now_s = cluster.backend.now_s()
  request = make_request(name, prompt, 40, now_s + later_s)
  cluster.submit(request, Placement(name, 0, 'prefill0', 'decode0'))


def run_out(cluster, is_over: Callable[[], bool] = lambda: False):
  events = []
  while not cluster.idle and not is_over():
    events += cluster.step(None)
    cluster.check()
  return events


def of(events, name):
  return [
    e for e in events if isinstance(e, RequestEvent) and e.request_id == name
  ]


@pytest.mark.parametrize('state', CASES)
def test_who_waits_too_long_fails_there_at_its_deadline(state):
  cluster, name, arrival_s = waiting(state)
  (event,) = [e for e in of(run_out(cluster), name) if isinstance(e, Failed)]
  assert event.reason == f'deadline while {state}: request_timeout_s=2.0'
  assert event.time_s == pytest.approx(arrival_s + TIMEOUT_S, abs=1e-9)
  assert not event.retryable


@pytest.mark.parametrize('state', CASES)
def test_a_cancel_is_the_last_event_and_frees_all_pages(state):
  cluster, name, _ = waiting(state)
  run, start_s = run_of(cluster), cluster.backend.now_s()
  cluster.cancel(name)
  events = run_out(
    cluster, lambda: not run.prefill_pages and not run.decode_pages
  )
  taken_s = cluster.backend.now_s() - start_s
  assert taken_s <= CASES[state].free_s + COSTS.decode_step_s(3, 200)
  last = of(events + run_out(cluster), name)[-1]
  assert isinstance(last, Cancelled) and last.time_s == start_s
  assert cluster.idle


def test_a_store_that_does_not_answer_is_waited_for_no_longer():
  spec = replace(
    ONE,
    mooncake_bytes=1 << 20,
    probe_timeout_s=0.5,
    request_timeout_s=60.0,
  )
  costs = replace(COSTS, remote_read_latency_s=LONG_S)
  cluster = make_virtual(spec, costs)
  submit(cluster, 'z')
  assert run_of(cluster).is_probing
  cluster.step(None)
  assert cluster.backend.now_s() == 0.5
  assert not run_of(cluster).is_probing
  assert run_of(cluster).state == 'prefilling'
  assert any(isinstance(e, Finished) for e in run_out(cluster))
