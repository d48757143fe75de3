# SPDX-License-Identifier: Apache-2.0
"""Blocks that leave host memory for the SSD, come back, and are lost."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Placement
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend

BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
# Host memory for ten blocks and an SSD for a hundred, one prefill instance.
TIERED = replace(
  SPEC,
  prefill_instances=1,
  host_bytes=10 * BLOCK_BYTES,
  ssd_bytes=100 * BLOCK_BYTES,
  lease_s=0.05,
)


@pytest.fixture(params=['virtual', 'device'])
def make_cluster(request, tmp_path):
  """Makes clusters on one backend, whose SSD is a folder of the test's."""
  with ExitStack() as stack:

    def make(spec):
      if request.param == 'virtual':
        return make_virtual(spec)
      cluster = make_device(replace(spec, ssd_url=tmp_path.as_uri()))
      stack.callback(close, cluster)
      return cluster

    yield make


def rounds(num_prompts, num_rounds, length=41, every_s=0.2):
  """Different prompts of five reusable blocks, asked round after round."""
  rng = np.random.default_rng(1)
  prompts = [rng.integers(2, 60, length) for _ in range(num_prompts)]
  return [
    make_request(f'{turn}.{i}', prompt, 3, every_s * (turn * num_prompts + i))
    for turn in range(num_rounds)
    for i, prompt in enumerate(prompts)
  ]


def serve_on(cluster, requests, spec, on_event=None):
  records, _ = serve(requests, make_conductor(spec), cluster, on_event=on_event)
  assert all(r.outcome == 'completed' for r in records), records
  cluster.check()
  assert cluster.idle
  return records


def test_what_leaves_host_memory_is_read_from_the_ssd(make_cluster):
  cluster = make_cluster(TIERED)
  events = []
  records = serve_on(cluster, rounds(6, 3), TIERED, events.append)
  tiers = [r.reused_tokens for r in records[6:]]
  assert any('local_ssd' in tier for tier in tiers)
  # Nothing was lost on the way down: all six prompts are reused whole.
  assert [sum(tier.values()) for tier in tiers] == [40] * 12
  down = {
    k
    for e in events
    if isinstance(e, BlocksStored) and e.tier == 'ssd'
    for k in e.keys
  }
  gone = {
    k
    for e in events
    if isinstance(e, BlocksEvicted) and e.tier == 'host'
    for k in e.keys
  }
  assert gone and gone <= down


def test_a_block_goes_back_to_host_memory_at_its_second_hit(make_cluster):
  """One prompt is asked over and over among others that push it out."""
  spec = replace(TIERED, host_bytes=40 * BLOCK_BYTES, promote_hits=2)
  requests = rounds(12, 1)
  cluster = make_cluster(spec)
  serve_on(cluster, requests, spec)
  cold, warm, hot = (asked_again(cluster, requests[0], spec) for _ in range(3))
  assert cold == {'local_ssd': 40}
  assert warm == {'local_ssd': 40}
  assert hot['local_host'] >= 32  # one may have found no room at once


def asked_again(cluster, request, spec):
  """What it reuses of what there is once nothing is under way."""
  conductor, now_s = make_conductor(spec), cluster.backend.now_s()
  for inventory in cluster.inventories():
    conductor.observe(inventory)
  later = replace(request, arrival_s=now_s + 2 * spec.lease_s)
  (record,), _ = serve([later], conductor, cluster)
  assert record.outcome == 'completed' and cluster.idle, record
  return record.reused_tokens


CACHED = replace(SPEC, prefill_instances=1, device_cache_tokens=96)


def test_what_stays_on_the_device_is_hit_without_a_move(make_cluster):
  """Two prompts of five blocks fit the cache of twelve."""
  cluster = make_cluster(CACHED)
  records = serve_on(cluster, rounds(2, 3), CACHED)
  assert [r.reused_tokens for r in records[2:]] == [{'local_device': 40}] * 4


def test_the_device_gives_the_head_and_the_host_the_rest(make_cluster):
  """Of three prompts two fit; of the oldest the head is left."""
  cluster = make_cluster(CACHED)
  records = serve_on(
    cluster, rounds(3, 3), CACHED, lambda event: cluster.check()
  )
  tiers = [r.reused_tokens for r in records[3:]]
  assert all(sum(tier.values()) == 40 for tier in tiers)
  assert any(len(tier) == 2 for tier in tiers)


def test_a_cached_block_is_fetched_by_others_from_the_host(make_cluster):
  spec = replace(SPEC, device_cache_tokens=80)
  cluster = make_cluster(spec)
  prompt = np.arange(41) % 50 + 2
  for i, name in enumerate(spec.prefill_names):
    request = make_request(f'r{i}', prompt, 3, arrival_s=0.5 * i)
    placement = Placement(
      request.request_id, 0, name, 'decode0', fetch_blocks=5
    )
    cluster.submit(request, placement)
    events = []
    while not cluster.idle:
      events += cluster.step(None)
  fetched = next(e for e in events if isinstance(e, PrefixFetched))
  assert (fetched.device_tokens, fetched.remote_tokens) == (0, 40)


@pytest.mark.parametrize('eviction', ['lru', 'lfu', 'length_aware', 'aged'])
def test_every_eviction_policy_serves(eviction):
  spec = replace(TIERED, eviction=eviction, device_cache_tokens=48)
  serve_on(make_virtual(spec), rounds(6, 3), spec)


def test_an_unknown_eviction_policy_is_named():
  with pytest.raises(ValueError, match="ClusterSpec.eviction='best'"):
    make_virtual(replace(SPEC, eviction='best'))


@pytest.mark.parametrize('field', ['host_bytes', 'ssd_bytes'])
def test_a_segment_too_small_for_a_block_is_named(field):
  with pytest.raises(ValueError, match=f'ClusterSpec.{field}=100 holds no'):
    make_virtual(replace(TIERED, **{field: 100}))


def test_with_no_ssd_they_are_just_gone(make_cluster):
  spec = replace(TIERED, ssd_bytes=0)
  records = serve_on(make_cluster(spec), rounds(6, 2), spec)
  assert sum(sum(r.reused_tokens.values()) for r in records[6:]) < 6 * 40


def test_a_full_ssd_evicts_and_never_overflows(make_cluster):
  spec = replace(TIERED, host_bytes=6 * BLOCK_BYTES, ssd_bytes=12 * BLOCK_BYTES)
  cluster = make_cluster(spec)
  events = []

  def check(event):
    events.append(event)
    cluster.check()

  serve_on(cluster, rounds(4, 6), spec, check)
  assert cluster.master.used_bytes('prefill0/ssd') <= spec.ssd_bytes
  for kind in (BlocksStored, BlocksEvicted):
    assert any(isinstance(e, kind) and e.tier == 'ssd' for e in events)


def placed(request, prefill, **kwargs):
  return Placement(request.request_id, 0, prefill, 'decode0', **kwargs)


def run_to_end(cluster):
  events = []
  while not cluster.idle:
    events += cluster.step(None)
  return events


@pytest.mark.parametrize('num_holders', [1, 2])
def test_a_holder_lost_mid_read_is_a_miss_or_its_replica_serves(
  make_cluster, num_holders
):
  """prefill2 reads from prefill0, which goes while the read is under way."""
  spec = replace(SPEC, prefill_instances=3)
  cluster = make_cluster(spec)
  prompt = np.arange(41) % 50 + 2
  texts = {}
  for i in range(num_holders):
    request = make_request(f'r{i}', prompt, 3)
    cluster.submit(request, placed(request, f'prefill{i}'))
    texts[i] = tokens_emitted(run_to_end(cluster))
  reader = make_request('reader', prompt, 3)
  plan = placed(reader, 'prefill2', fetch_blocks=5, fetch_from='prefill0')
  cluster.submit(reader, plan)
  cluster.lose_segment('prefill0')
  events = run_to_end(cluster)
  assert tokens_emitted(events) == texts[0]
  fetched = next(e for e in events if isinstance(e, PrefixFetched))
  if num_holders == 2:
    assert fetched.remote_tokens == 40
  elif isinstance(cluster.backend, VirtualBackend):
    assert fetched.remote_tokens == 0
  cluster.check()


def tokens_emitted(events):
  return [
    t for e in events if isinstance(e, TokensEmitted) for t in e.emitted.tokens
  ]


def test_a_reader_slower_than_its_lease_has_what_is_still_there(make_cluster):
  spec = replace(SPEC, prefill_instances=1, lease_s=1e-9)
  cluster = make_cluster(spec)
  first, *later = records = serve_on(cluster, rounds(1, 3), spec)
  assert first.reused_tokens == {}
  assert all(sum(r.reused_tokens.values()) == 40 for r in later)
  assert len({tuple(r.output_tokens) for r in records}) == 1


def test_device_memory_is_lost_with_its_instance_only(make_cluster):
  cluster = make_cluster(CACHED)
  with pytest.raises(ValueError, match='prefill0/device'):
    cluster.lose_segment('prefill0/device')


def test_a_hot_block_that_lost_a_copy_gets_one_again(make_cluster):
  cluster = make_cluster(SPEC)
  prompt = np.arange(41) % 50 + 2
  a, b = SPEC.prefill_names
  for i, name in enumerate((a, b)):
    request = make_request(f'r{i}', prompt, 3, arrival_s=0.5 * i)
    cluster.submit(request, Placement(request.request_id, 0, name, 'decode0'))
    while not cluster.idle:
      cluster.step(None)
  key = request.block_keys[0]
  assert len(cluster.master.peek(key)) == 2
  cluster.lose_segment(a)
  assert len(cluster.master.peek(key)) == 1
  until_s = cluster.backend.now_s() + 3.0
  while cluster.backend.now_s() < until_s:
    cluster.step(cluster.backend.now_s() + 0.5)
  assert {r.segment for r in cluster.master.peek(key)} == {a, b}
  cluster.check()


def tokens_of(records):
  return [tuple(r.output_tokens) for r in records]


def served_once(spec, requests):
  """Records of a cluster that is closed again; its SSD stays."""
  cluster = make_device(spec)
  try:
    return serve_on(cluster, requests, spec)
  finally:
    close(cluster)


def test_the_ssd_outlives_the_process(tmp_path):
  """A second cluster hits what the first one left, and says so at once."""
  spec = replace(TIERED, ssd_url=tmp_path.as_uri())
  first = served_once(spec, rounds(6, 1))
  again = served_once(spec, rounds(6, 1))
  assert tokens_of(again) == tokens_of(first)
  assert sum(r.reused_tokens.get('local_ssd', 0) for r in again) >= 40


@pytest.mark.parametrize('damage', ['flip', 'truncate', 'remove'])
def test_a_damaged_file_is_a_miss_and_never_read(tmp_path, damage):
  spec = replace(TIERED, ssd_url=tmp_path.as_uri())
  first = served_once(spec, rounds(6, 1))
  files = sorted(p for p in tmp_path.rglob('*/*-*') if p.is_file())
  assert len(files) > 20
  for file in files[::2]:
    data = bytearray(file.read_bytes())
    if damage == 'remove':
      file.unlink()
    elif damage == 'truncate':
      file.write_bytes(data[: len(data) // 2])
    else:
      data[-7] ^= 4
      file.write_bytes(data)
  again = served_once(spec, rounds(6, 1))
  assert tokens_of(again) == tokens_of(first)
