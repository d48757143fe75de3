# SPDX-License-Identifier: Apache-2.0
"""Works started behind a read: kept if it brings all, void if it does not."""

from dataclasses import replace

import numpy as np
import pytest

from fuzz import Flaky
from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Finished
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.request import Placement
from mooncake_jax.sim.remote_store import RemoteStore

BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
ONE = replace(SPEC, prefill_instances=1, high_watermark=1.0)
PROMPT = np.arange(41) * 7 % 50 + 2
OTHER = np.arange(41) * 3 % 50 + 2


class Watched(Flaky):
  """Slow reads into devices; bytes that were dropped can still be read."""

  def __init__(self, spec, onload_s=1.0):
    super().__init__(spec, 0, 0, RemoteStore())
    self._costs = replace(
      COSTS, onload_latency_s=onload_s, offload_latency_s=1e-3
    )
    self.drops_are_read = True


def submit(cluster, name, prompt):
  backend = cluster.backend
  request = make_request(name, prompt, 3, backend.now_s())
  if isinstance(backend, Watched):
    backend.shadow.know(request, SPEC.block_size_tokens)
  cluster.submit(request, Placement(name, 0, 'prefill0', 'decode0'))
  return request


def run(cluster, until_s=float('inf')):
  events = []
  while not cluster.idle and cluster.backend.now_s() < until_s:
    events += cluster.step(None if until_s == float('inf') else until_s)
    cluster.check()
  return events


def of(events, kind, name):
  return next(e for e in events if isinstance(e, kind) and e.request_id == name)


@pytest.mark.parametrize('stages', [1, 3])
def test_what_was_overwritten_while_it_was_read_is_computed(stages):
  """b's prefix goes after its lease, while it is read; c takes its room."""
  spec = replace(ONE, host_bytes=5 * BLOCK_BYTES, lease_s=1e-3, stages=stages)
  backend = Watched(spec)
  cluster = Cluster(spec, MODEL, backend)
  keys = submit(cluster, 'a', PROMPT).block_keys
  run(cluster)
  submit(cluster, 'b', PROMPT)
  started_s = backend.now_s()
  run(cluster, started_s + 0.1)
  cluster.drop(keys, 'prefill0')
  submit(cluster, 'c', OTHER)
  events = run(cluster)
  fetched, done = of(events, PrefixFetched, 'b'), of(events, PrefillDone, 'b')
  assert fetched.local_tokens == 0
  assert fetched.time_s >= started_s + 1.0
  assert done.computed_tokens == 41
  assert not backend.shadow.wrong_tokens
  for event in events:
    if isinstance(event, BlocksStored):
      for key in event.keys:
        assert all(map(backend.shadow.is_right, cluster.master.peek(key)))


def test_a_read_longer_than_its_lease_counts_if_all_is_still_there():
  spec = replace(ONE, lease_s=1e-3)
  cluster = Cluster(spec, MODEL, Watched(spec))
  submit(cluster, 'a', PROMPT)
  run(cluster)
  submit(cluster, 'b', PROMPT)
  events = run(cluster)
  assert of(events, PrefixFetched, 'b').local_tokens == 40
  assert cluster.master.statistics().counts.calls['get_chain'] <= 2


def test_a_cancel_at_any_moment_leaves_nothing_behind():
  """Reading, computing behind the read, handing over, putting, decoding."""
  spec = replace(ONE, chunk_tokens=8, stages=2, layers_per_transfer=1)
  moments, is_over = 0, False
  while not is_over:
    cluster = Cluster(spec, MODEL, Watched(spec, 1e-3))
    submit(cluster, 'a', PROMPT[:25])
    run(cluster)
    submit(cluster, 'b', PROMPT)
    for _ in range(moments):
      is_over |= any(isinstance(e, Finished) for e in cluster.step(None))
    cluster.cancel('b')
    run(cluster)
    cluster.check()
    assert cluster.idle
    moments += 1
  assert moments > 10


def test_a_chunk_longer_than_a_transfer_may_take_still_hands_over():
  costs = replace(COSTS, prefill_base_s=50.0)
  cluster = make_virtual(replace(ONE, transfer_timeout_s=0.01), costs=costs)
  submit(cluster, 'a', PROMPT[:17])
  events = run(cluster)
  assert of(events, KVArrived, 'a').time_s > 100
  assert len(cluster.inventory('prefill0')) == 2


def test_a_prompt_computes_while_its_prefix_arrives():
  """Chunks wait for all of it, layers only for the first third."""
  done_s = {}
  for streaming in ('chunks', 'layers'):
    spec = replace(ONE, streaming=streaming, layers_per_transfer=1)
    costs = replace(COSTS, onload_latency_s=3e-3, prefill_base_s=3e-3)
    cluster = make_virtual(spec, costs=costs)
    submit(cluster, 'a', PROMPT)
    run(cluster)
    start_s = cluster.backend.now_s()
    submit(cluster, 'b', PROMPT)
    done = of(run(cluster), PrefillDone, 'b')
    done_s[streaming] = done.time_s - start_s
    assert done.computed_tokens == 1
  read_s = costs.transfer_s(5 * BLOCK_BYTES, 'onload')
  assert done_s['chunks'] - done_s['layers'] == pytest.approx(
    2 / 3 * read_s, rel=0.01
  )
