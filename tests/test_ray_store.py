# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own, and a store that they share.

A real Mooncake Store where its wheel is installed, and blocks in a folder. What
one process computed another one gets, also its own next one and the next
driver's; whatever the store does, all requests end with the right tokens.
"""

from collections.abc import Callable
from collections.abc import Iterable
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace
import importlib.util
from pathlib import Path
import shutil
import signal
import time

import numpy as np
import pytest

from engine_pieces import MODEL
from lifecycle import COSTS
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster import Cluster
from mooncake_jax.distributed.worker import StoreSource
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_source import MooncakeSource
from ray_pieces import lost
from ray_pieces import one_process
from ray_pieces import RAY
from ray_pieces import ray_cluster
from ray_pieces import send
from ray_pieces import serve_watched
from ray_pieces import settle
from ray_pieces import Tokens
from ray_pieces import tokens_of
from ray_pieces import Watch
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage
from tests.folder_store import FolderSource

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('ray') is None, reason='Ray is not installed'
)
ONE = replace(
  SPEC,
  prefill_instances=1,
  decode_instances=1,
  mooncake_bytes=1 << 20,
  probe_timeout_s=1.0,
)
TWO = replace(ONE, prefill_instances=2)
BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
LIMIT_S = 2.0


@dataclass
class Store:
  """What processes share.

  Attributes:
    evict: takes blocks away, behind everybody's back.
    kill: ends it.
  """

  source: StoreSource
  evict: Callable[[Iterable[BlockKey]], object]
  kill: Callable[[], object]


@contextmanager
def folder(path: Path):
  def evict(keys: Iterable[BlockKey]) -> None:
    for key in keys:
      (path / key.hex()).unlink()

  gone = path.with_suffix('.gone')
  yield Store(FolderSource(str(path)), evict, lambda: path.rename(gone))


@contextmanager
def mooncake(path: Path):
  with ExitStack() as stack:
    master = stack.enter_context(running_master(lease_s=0.2))
    stack.enter_context(running_storage(master.address, 16 << 20))
    config = MooncakeConfig(master.address, timeout_s=LIMIT_S, pause_s=0.2)
    source = MooncakeSource(config, ONE.mooncake_bytes)
    block = BlockFormat.of(MODEL, SPEC.block_size_tokens, 'float32')
    aside = source.open(block, '127.0.0.1')
    stack.callback(aside.close)

    def evict(keys: Iterable[BlockKey]) -> None:
      aside.remove([*keys], force=True)

    yield Store(source, evict, master.kill)


@pytest.fixture(scope='module', params=[folder, mooncake])
def store(request, tmp_path_factory):
  if request.param is mooncake:
    try:
      import_wheel('mooncake.store')
    except ImportError as missing:
      pytest.skip(str(missing))
  with request.param(tmp_path_factory.mktemp('store')) as made:
    yield made


@pytest.fixture(scope='module')
def cluster(store):
  """Two prefill instances and one that decodes, each in a process."""
  with ray_cluster(TWO, store=store.source) as backend:
    yield Cluster(TWO, MODEL, backend, costs=COSTS)


@pytest.fixture(scope='module')
def expected():
  with one_process() as tokens:
    yield tokens


def ask(seed, name='r', arrival_s=0.0):
  """Five blocks and a token."""
  prompt = np.random.default_rng(seed).integers(2, MODEL.vocab_size, 41)
  return make_request(name, prompt, 4, arrival_s)


def by(cluster, name: str, request) -> tuple[dict[str, int], Tokens]:
  """What an instance reuses for a request, and what is answered."""
  arrival_s, tokens = cluster.backend.now_s(), []
  cluster.submit(
    replace(request, arrival_s=arrival_s),
    Placement(request.request_id, 0, name, 'decode0'),
  )
  reused = {}
  while not cluster.idle:
    for event in cluster.step(None):
      if isinstance(event, PrefixFetched):
        found = {'host': event.local_tokens, 'store': event.store_tokens}
        found |= {'ssd': event.ssd_tokens, 'remote': event.remote_tokens}
        reused = {tier: count for tier, count in found.items() if count}
      elif isinstance(event, TokensEmitted):
        tokens += event.emitted.tokens
  settle(cluster)
  return reused, {request.request_id: tuple(tokens)}


def kill(cluster, name: str) -> None:
  """Ends a process and waits until its next one is there."""
  send(cluster.backend, name, signal.SIGKILL)
  events = []
  while not any(isinstance(e, InstanceJoined) for e in events):
    events += cluster.step(cluster.backend.now_s() + 0.2)
  settle(cluster)


def moved(cluster, way: str, name: str) -> float:
  """Bytes between an instance and the store."""
  use = cluster.backend.link_uses().get((f'remote_{way}', name))
  return use.num_bytes if use else 0.0


def test_a_process_gets_what_another_computed(cluster, expected):
  request = ask(1)
  first, right = by(cluster, 'prefill0', request), expected([request])
  assert first == ({}, right)
  assert {*cluster.inventory(REMOTE)} == {*request.block_keys}
  second = by(cluster, 'prefill1', request)
  assert second == ({'store': 40}, right)
  # It is in that process's own memory from now on.
  assert by(cluster, 'prefill1', request) == ({'host': 40}, right)
  until_s = time.monotonic() + 10
  while not moved(cluster, 'read', 'prefill1'):
    assert time.monotonic() < until_s  # told once a second
  assert moved(cluster, 'read', 'prefill1') == 5 * BLOCK_BYTES
  assert moved(cluster, 'write', 'prefill0') == 5 * BLOCK_BYTES
  assert not cluster.backend.link_uses()['wire', 'prefill1'].num_bytes


def test_the_next_process_of_an_instance_gets_them_and_it_was_planned(
  cluster, expected
):
  request = ask(2, 'planned')
  by(cluster, 'prefill0', request)
  kill(cluster, 'prefill0')
  watch = Watch()
  (record,) = serve_watched([request], cluster, watch)
  (plan,) = watch.placed.values()
  assert plan.transfer_s > 0.0
  assert plan.prefill_s == COSTS.prompt_s(41, 40, SPEC.chunk_tokens)
  assert record.reused_tokens == {'remote_store': 40}
  assert tokens_of([record]) == expected([request])


def test_evicted_blocks_are_a_miss(cluster, store, expected):
  request = ask(3)
  by(cluster, 'prefill0', request)
  store.evict(request.block_keys[2:])
  reused, tokens = by(cluster, 'prefill1', request)
  assert reused == {'store': 16} and tokens == expected([request])


def test_an_instance_killed_that_reads_there(cluster, expected):
  requests = [ask(4, f'r{i}') for i in range(4)]
  by(cluster, 'prefill0', requests[0])
  cluster.lose_segment('prefill0')

  def on_event(watch, event):
    if not isinstance(event, PrefixFetched):
      return False
    send(cluster.backend, event.instance, signal.SIGKILL)
    return True

  records = serve_watched(requests, cluster, watch := Watch(on_event))
  assert len(lost(watch)) == 1
  assert tokens_of(records) == expected(requests)
  assert any('remote_store' in r.reused_tokens for r in records)


def test_the_next_driver_gets_them(cluster, store, expected, tmp_path):
  """And a process that has an SSD finds there what its last one published."""
  request, ssd = ask(5), 'prefill0/ssd'
  by(cluster, 'prefill0', request)
  spec = replace(ONE, ssd_bytes=1 << 20, ssd_url=f'file://{tmp_path}')
  beside = replace(RAY, num_cpus=0.0)  # what is there is taken
  with ray_cluster(spec, beside, store.source) as backend:
    other = Cluster(spec, MODEL, backend, costs=COSTS)
    assert other.inventory(REMOTE) == ()
    found = by(other, 'prefill0', request)
    assert found == ({'store': 40}, expected([request]))
    other.replicate(request.block_keys, 'prefill0', ssd)
    settle(other)
    assert {*other.inventory(ssd)} == {*request.block_keys}
    # One that nobody published, be it from a work that went wrong.
    one, foreign = (
      tmp_path / ssd.split('/')[0] / key.hex()
      for key in (request.block_keys[0], b'foreign')
    )
    shutil.copytree(one, foreign)
    store.evict(request.block_keys)
    kill(other, 'prefill0')
    assert {*other.inventory(ssd)} == {*request.block_keys}
    # It may be copied to host memory meanwhile, as it was there before.
    reused, tokens = by(other, 'prefill0', request)
    assert reused in ({'ssd': 40}, {'host': 40})
    assert tokens == expected([request])
    assert one.exists() and not foreign.exists()


def test_a_store_that_dies_is_a_tier_that_is_gone(cluster, store, expected):
  """Also for a process that starts without it. The last test here."""
  requests = [ask(6, f'r{i}') for i in range(6)]

  def on_event(watch, event):
    if not isinstance(event, BlocksStored) or event.tier != 'remote':
      return False
    store.kill()
    return True

  records = serve_watched(requests, cluster, watch := Watch(on_event))
  assert watch.acted_s is not None
  assert tokens_of(records) == expected(requests)
  kill(cluster, 'prefill0')
  for seed in (1, 6):  # what the store is thought to have, and what not
    reused, tokens = by(cluster, 'prefill0', ask(seed))
    assert 'store' not in reused and tokens == expected([ask(seed)])
