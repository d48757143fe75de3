# SPDX-License-Identifier: Apache-2.0
"""What happens to a cluster at given times, and that a run repeats."""

from dataclasses import replace

import pytest

from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import MODEL
from lifecycle import shared_prefix_requests
from lifecycle import SPEC
from mooncake_jax.arrivals import Agenda
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.changes import Change
from mooncake_jax.changes import Changes
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import Cancelled
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend

MANY = (
  Change(0.05, 'slow', 'prefill0', compute=3.0, links=2.0),
  Change(0.1, 'lose', 'decode1'),
  Change(0.12, 'wipe', 'prefill1'),
  Change(0.2, 'join', 'decode1'),
  Change(0.25, 'drain', 'prefill0'),
  Change(0.3, 'slow', 'prefill0'),
  Change(0.4, 'join', 'prefill0'),
  Change(0.45, 'cancel', 'r90'),
  Change(1e6, 'lose', 'prefill1'),
)


def run(changes: Changes):
  cluster = Cluster(SPEC, MODEL, VirtualBackend(COSTS, LAYERS))
  requests = shared_prefix_requests(100, every_s=0.005, output=12)
  records, journal = serve(
    requests, make_conductor(SPEC), cluster, changes=changes
  )
  cluster.check()
  return records, journal, cluster


def test_changes_happen_at_their_times_and_every_run_is_the_same():
  changes = Changes(MANY, cancel_share=0.3, cancel_after_s=0.01, seed=5)
  records, journal, cluster = run(changes)
  again, journal_again, _ = run(changes)
  assert records == again and journal == journal_again
  assert cluster.backend.now_s() < 10  # the last one comes too late
  told = [e for e in journal if isinstance(e, InstanceLost | InstanceJoined)]
  assert [(type(e), e.instance) for e in told] == [
    (InstanceLost, 'decode1'),
    (InstanceJoined, 'decode1'),
    (InstanceLost, 'prefill0'),
    (InstanceJoined, 'prefill0'),
  ]
  times = [e.time_s for e in told]
  assert times == [0.1, 0.2, times[2], 0.4] and 0.25 <= times[2] < 0.4
  cancelled = [e for e in journal if isinstance(e, Cancelled)]
  assert 10 < len(cancelled) < 40
  assert {r.outcome for r in records} == {'completed', 'cancelled'}


def test_clients_go_away_when_they_would_whoever_else_does():
  few, more = (
    {e.request_id: e.time_s for e in run(c)[1] if isinstance(e, Cancelled)}
    for c in (
      Changes(cancel_share=0.1, cancel_after_s=0.004, seed=1),
      Changes(cancel_share=0.6, cancel_after_s=0.004, seed=1),
    )
  )
  assert few and few.items() <= more.items() and len(more) > 2 * len(few)


def test_a_client_may_go_away_at_the_very_time_it_came():
  cluster = Cluster(SPEC, MODEL, VirtualBackend(COSTS, LAYERS))
  (request,) = shared_prefix_requests(1)
  gone = Changes((Change(request.arrival_s, 'cancel', request.request_id),))
  records, _ = serve([request], make_conductor(SPEC), cluster, changes=gone)
  assert [record.outcome for record in records] == ['cancelled']


@pytest.mark.parametrize('max_decode_steps', [1, 8, 64])
def test_a_client_that_goes_has_the_tokens_that_came(max_decode_steps):
  """However many steps a simulation makes at once."""
  spec = replace(SPEC, max_decode_steps=max_decode_steps)
  cluster = Cluster(spec, MODEL, VirtualBackend(COSTS, LAYERS))
  (request,) = shared_prefix_requests(1, output=60)
  gone = Changes((Change(0.1, 'cancel', request.request_id),))
  (record,), _ = serve([request], make_conductor(spec), cluster, changes=gone)
  assert (record.outcome, record.num_output_tokens) == ('cancelled', 44)


def test_a_name_that_comes_twice_is_told_before_anything_runs():
  request, *_ = shared_prefix_requests(1)
  with pytest.raises(ValueError, match="request_id='r0' came twice"):
    Agenda([request, request])


def test_a_slow_instance_takes_longer_until_it_is_quick_again():
  backend = VirtualBackend(COSTS, LAYERS)
  seconds = []
  for factor in (1.0, 2.5, 1.0):
    backend.slow('p', factor, 1.0)
    backend.prefill('p', PrefillChunk('r', 0, 0, 10, (1,)))
    backend.prefill('q', PrefillChunk('r', 0, 0, 10, (1,)))
    ends = []
    while completions := backend.wait(None):
      ends += completions
    seconds.append([end.time_s - end.started_s for end in ends])
  one = COSTS.prefill_s(10, 0)
  assert seconds == [
    pytest.approx([one, one]),
    pytest.approx([one, 2.5 * one]),
    pytest.approx([one, one]),
  ]


@pytest.mark.parametrize(
  ('field', 'make'),
  [
    ('at_s', lambda: Change(-1.0, 'lose', 'x')),
    ('compute', lambda: Change(1.0, 'slow', 'x', compute=0)),
    ('what', lambda: Change(1.0, 'explode', 'x')),  # pyright: ignore
    ('cancel_share', lambda: Changes(cancel_share=1.5)),
    ('cancel_after_s', lambda: Changes(cancel_after_s=0)),
  ],
)
def test_bad_changes_are_named(field, make):
  with pytest.raises(ValueError, match=field):
    make()


def test_what_can_not_be_stops_the_run_and_is_named():
  with pytest.raises(ValueError, match="instance='prefill9'"):
    run(Changes((Change(0.1, 'lose', 'prefill9'),)))
  with pytest.raises(ValueError, match="Change.whom='decode9'"):
    run(Changes((Change(0.1, 'slow', 'decode9', compute=2.0),)))
