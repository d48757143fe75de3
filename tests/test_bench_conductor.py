# SPDX-License-Identifier: Apache-2.0
"""What the Conductor's benchmark tells is what a cluster could."""

from collections import defaultdict

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Placement
from mooncake_jax.workload.tokens import to_requests
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from scripts.benches.conductor_load import ToldCluster
from trace_strategies import traces_of


def told(requests, capacity):
  """All events of requests placed in turn on two instances, as they come."""
  cluster, events = ToldCluster(capacity, chunk_blocks=2), []
  for i, request in enumerate(requests):
    events += cluster.until(request.arrival_s)
    name = f'prefill{i % 2}'
    cluster.submit(
      request,
      Placement(request.request_id, 0, name, 'decode0', prefill_s=3, tbt_s=0.1),
    )
  return events + cluster.until(float('inf'))


@settings(max_examples=30)
@given(traces_of(TOKENS_PER_HASH_ID, max_rows=20), st.integers(1, 20))
def test_requests_end_once_and_stores_hold_what_they_can(rows, capacity):
  requests = to_requests(rows, block_size_tokens=TOKENS_PER_HASH_ID)
  events = told(requests, capacity)
  assert [e.time_s for e in events] == sorted(e.time_s for e in events)
  by_request, held, seqs = defaultdict(list), defaultdict(set), defaultdict(int)
  for event in events:
    if isinstance(event, TokensEmitted):
      ((name, _),) = event.emitted.tries
      by_request[name].append(event)
      continue
    if isinstance(event, RequestEvent):
      by_request[event.request_id].append(event)
      continue
    assert isinstance(event, BlocksStored | BlocksEvicted)
    seqs[event.instance] += 1
    assert event.seq == seqs[event.instance]
    blocks, keys = held[event.instance], set(event.keys)
    if isinstance(event, BlocksStored):
      assert not blocks & keys
      blocks |= keys
    else:
      assert blocks >= keys
      blocks -= keys
      assert len(blocks) <= max(capacity, 6)  # the longest prompt
  for request in requests:
    life = by_request[request.request_id]
    kinds = [type(event) for event in life]
    assert kinds.count(PrefillDone) == 1 and kinds[-1] is Finished
    tokens = sum(
      e.emitted.segment.count for e in life if isinstance(e, TokensEmitted)
    )
    assert tokens == request.max_output_tokens
