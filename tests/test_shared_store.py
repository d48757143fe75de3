# SPDX-License-Identifier: Apache-2.0
"""A store that clusters of several processes share, simulated and real.

Each cluster here is a process's: it has its own Master and memory. The real
Mooncake Store, where its wheel is installed, runs as processes of its own.
"""

from collections.abc import Callable
from collections.abc import Iterable
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace
import os
import signal
import threading

import numpy as np
import pytest

from lifecycle import close
from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster import Cluster
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Finished
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.serve import Decision
from mooncake_jax.serve import serve
from mooncake_jax.sim.remote_store import RemoteStore
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.transfer.entry import BlockFormat
from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
# The pool holds one prompt, so a second one waits.
SHARED = replace(
  SPEC,
  prefill_instances=1,
  decode_instances=1,
  prefill_pool_tokens=64,
  mooncake_bytes=1 << 20,
)
PROMPT = np.random.default_rng(5).integers(2, 60, 41)
# A store that is asked for at most so long, in calls and in probes.
LIMIT_S, PROBE_S = 2.0, 0.3


@dataclass
class World:
  """What processes share, and how a process joins.

  Attributes:
    join: a cluster with empty memory.
    evict: takes blocks away, behind everybody's back.
  """

  join: Callable[..., Cluster]
  evict: Callable[[Iterable[BlockKey]], object]


@contextmanager
def virtual_world():
  store = RemoteStore()
  yield World(
    lambda spec=SHARED: Cluster(
      spec, MODEL, VirtualBackend(COSTS, LAYERS, store=store)
    ),
    store.evict,
  )


def open_store(master: str) -> MooncakeSegment:
  config = MooncakeConfig(master, timeout_s=LIMIT_S, pause_s=0.2)
  block = BlockFormat(
    MODEL.num_layers,
    SPEC.block_size_tokens,
    MODEL.num_kv_heads,
    MODEL.head_dim,
    np.dtype('float32'),
  )
  return MooncakeSegment(REMOTE, config, block, SHARED.mooncake_bytes)


@contextmanager
def joined(master: str, spec=SHARED):
  """A cluster on devices that uses the store of a master."""
  spec = replace(spec, probe_timeout_s=PROBE_S)
  cluster = make_device(spec, stores=[open_store(master)])
  try:
    yield cluster
  finally:
    close(cluster)


@contextmanager
def real_world():
  with ExitStack() as stack:
    master = stack.enter_context(running_master()).address
    stack.enter_context(running_storage(master, 16 << 20))
    aside = open_store(master)
    stack.callback(aside.close)
    yield World(
      lambda spec=SHARED: stack.enter_context(joined(master, spec)),
      lambda keys: aside.remove([*keys], force=True),
    )


@pytest.fixture(scope='module')
def wheel():
  try:
    import_wheel('mooncake.store')
  except ImportError as missing:
    pytest.skip(str(missing))


@pytest.fixture(params=['virtual', 'mooncake'])
def world(request):
  if request.param == 'mooncake':
    request.getfixturevalue('wheel')
  with virtual_world() if request.param == 'virtual' else real_world() as made:
    yield made


def ask(name='r', prompt=PROMPT, arrival_s=0.0):
  return make_request(name, prompt, 4, arrival_s)


def served(cluster, requests, on_event=None):
  """Serves after what the cluster has done before; checks it at the end."""
  now_s = cluster.backend.now_s()
  later = [replace(r, arrival_s=r.arrival_s + now_s) for r in requests]
  records, _ = serve(
    later, make_conductor(cluster.spec), cluster, on_event=on_event
  )
  assert [r.outcome for r in records] == ['completed'] * len(records)
  cluster.check()
  assert cluster.idle
  return records


@pytest.fixture(scope='module')
def right_tokens():
  """What a cluster that shares nothing answers to PROMPT."""
  cluster = make_device(replace(SHARED, mooncake_bytes=0))
  (record,) = served(cluster, [ask()])
  close(cluster)
  return record.output_tokens


def is_right(record, cluster, right_tokens) -> bool:
  """Whether it is the right answer; a simulation computes none."""
  simulated = isinstance(cluster.backend, VirtualBackend)
  return record.output_tokens == ([] if simulated else right_tokens)


def test_a_process_gets_what_another_computed(world, right_tokens):
  first, second = world.join(), world.join()
  (cold,) = served(first, [ask()])
  (warm,) = served(second, [ask()])
  assert cold.reused_tokens == {}
  assert warm.reused_tokens == {'remote_store': 40}
  assert is_right(warm, second, right_tokens)
  assert second.master.statistics().counts.hits == {'remote': 5}
  # It is in this process's own memory from now on.
  (again,) = served(second, [ask()])
  assert again.reused_tokens == {'local_host': 40}


def test_the_store_gives_only_what_an_instance_lacks(world):
  first, second = world.join(), world.join()
  served(first, [ask()])
  served(second, [ask('head', PROMPT[:20])])
  (record,) = served(second, [ask()])
  assert record.reused_tokens == {'local_host': 16, 'remote_store': 24}


def test_blocks_go_there_at_the_nth_use(world):
  spec = replace(SHARED, mooncake_put_uses=2)
  first, second = world.join(spec), world.join(spec)
  served(first, [ask()])
  assert first.inventory(REMOTE) == ()
  served(first, [ask('again')])
  assert {*first.inventory(REMOTE)} == {*ask().block_keys[:5]}
  (record,) = served(second, [ask()])
  assert record.reused_tokens == {'remote_store': 40}


def test_a_block_that_went_before_the_read_is_recomputed(world, right_tokens):
  """The second request waits for the first one's pages between probe and
  read; meanwhile its second block goes."""
  first, second = world.join(), world.join()
  served(first, [ask()])
  gone = ask().block_keys[1]
  events = []

  def lose(event):
    told = [e for e in events if isinstance(e, BlocksStored)]
    if isinstance(event, BlocksStored) and gone in event.keys and not told:
      world.evict([gone])
    events.append(event)

  other = ask('other', PROMPT[::-1])
  records = served(second, [other, ask()], lose)
  assert records[1].reused_tokens == {'remote_store': 8}
  assert is_right(records[1], second, right_tokens)
  told = [e.keys for e in events if isinstance(e, BlocksEvicted)]
  assert (gone,) in told
  # Computed anew, it is there again for others.
  (third,) = served(world.join(), [ask()])
  assert third.reused_tokens == {'remote_store': 40}


def test_a_belief_that_a_probe_contradicts_is_dropped(world):
  cluster = world.join()
  served(cluster, [ask()])
  keys = ask().block_keys
  assert {*cluster.inventory(REMOTE)} == {*keys}
  world.evict(keys[2:])
  cluster.lose_segment('prefill0')
  events = []
  (record,) = served(cluster, [ask()], events.append)
  assert record.reused_tokens == {'remote_store': 16}
  told = [e.keys for e in events if isinstance(e, BlocksEvicted)]
  assert (keys[2],) in told
  assert keys[2] in cluster.inventory(REMOTE)  # put anew


def test_the_conductor_plans_to_read_what_the_store_has():
  """Told of it by events; priced as a read from there."""
  store = RemoteStore(ask().block_keys)
  spec = replace(SHARED, prefill_instances=2)
  cluster = Cluster(spec, MODEL, VirtualBackend(COSTS, LAYERS, store=store))

  def lose(event):  # whoever it was placed on has it only there from now on
    if isinstance(event, Finished) and event.request_id == 'r':
      for name in spec.prefill_names:
        cluster.lose_segment(name)

  requests = [ask(), ask('again', arrival_s=1.0)]
  conductor = make_conductor(spec)
  _, journal = serve(requests, conductor, cluster, on_event=lose)
  plans = [e.decision for e in journal if isinstance(e, Decision)]
  plans = [plan for plan in plans if isinstance(plan, Placement)]
  assert len(plans) == 2
  assert plans[0].transfer_s == 0.0  # what others have put, nobody knows yet
  read_s = COSTS.transfer_s(5 * BLOCK_BYTES, 'remote_read')
  assert 0.0 < plans[1].transfer_s <= read_s  # less what streaming hides
  assert plans[1].prefill_s == COSTS.prompt_s(41, 40, SPEC.chunk_tokens)


def test_no_request_waits_for_a_slow_store_beyond_its_patience():
  slow = replace(COSTS, remote_read_latency_s=5.0)
  store = RemoteStore(ask().block_keys)
  cluster = Cluster(SHARED, MODEL, VirtualBackend(slow, LAYERS, store=store))
  (record,) = served(cluster, [ask()])
  assert record.reused_tokens == {}
  assert record.fetch_start_s == pytest.approx(SHARED.probe_timeout_s)


def test_a_cluster_without_a_store_asks_none():
  class Mute(VirtualBackend):
    def probe(self, instance, segment, keys, deadline_s):
      raise AssertionError(f'{segment} was asked')

  cluster = Cluster(
    replace(SHARED, mooncake_bytes=0), MODEL, Mute(COSTS, LAYERS)
  )
  served(cluster, [ask()])
  assert REMOTE not in cluster.master.segments()


def test_a_block_the_store_is_believed_to_have_still_goes_to_the_ssd():
  """Beliefs save nothing: what leaves host memory is offloaded as ever."""
  spec = replace(
    SHARED, host_bytes=10 * BLOCK_BYTES, ssd_bytes=100 * BLOCK_BYTES
  )
  store = RemoteStore()
  cluster = Cluster(
    replace(spec, lease_s=0.05),
    MODEL,
    VirtualBackend(COSTS, LAYERS, store=store),
  )
  rng = np.random.default_rng(1)
  prompts = [rng.integers(2, 60, 41) for _ in range(6)]
  served(cluster, [ask(f'{i}', p, 0.2 * i) for i, p in enumerate(prompts)])
  store.evict(key for p in prompts for key in ask('', p).block_keys)
  records = served(cluster, [ask('0', prompts[0])])
  assert sum(records[0].reused_tokens.values()) == 40
  assert 'remote_store' not in records[0].reused_tokens


# Faults of the real store: whatever it does, the answer is right, in time.


def test_storage_killed_between_probe_and_read(wheel, right_tokens):
  with running_master() as master:
    with running_storage(master.address, 16 << 20) as storage:
      with joined(master.address) as first:
        served(first, [ask()])

      def kill(event):
        if isinstance(event, BlocksStored) and event.tier == 'remote':
          storage.kill()

      with joined(master.address) as second:
        other = ask('other', PROMPT[::-1])
        records = served(second, [other, ask()], kill)
        assert records[1].output_tokens == right_tokens
        assert 'remote_store' not in records[1].reused_tokens


def test_storage_killed_while_blocks_are_read(wheel, right_tokens):
  """Frozen first, so that the reads are under way when it dies."""
  with running_master() as master:
    with running_storage(master.address, 16 << 20) as storage:
      with joined(master.address) as first:
        served(first, [ask()])
      with joined(master.address) as second:
        os.kill(storage.process.pid, signal.SIGSTOP)
        timer = threading.Timer(0.5, storage.kill)
        timer.start()
        (record,) = served(second, [ask()])
        timer.join()
        assert record.output_tokens == right_tokens
        assert record.ttft_s is not None
        assert record.ttft_s < 0.5 + 2 * LIMIT_S


def test_master_killed_while_it_is_asked(wheel, right_tokens):
  with running_master() as master:
    with running_storage(master.address, 16 << 20):
      with joined(master.address) as first:
        served(first, [ask()])
      with joined(master.address) as second:
        os.kill(master.process.pid, signal.SIGSTOP)
        timer = threading.Timer(PROBE_S / 2, master.kill)
        timer.start()
        (record,) = served(second, [ask()])
        timer.join()
        assert record.output_tokens == right_tokens
        assert record.reused_tokens == {}
        assert record.fetch_start_s and record.placed_s
        assert record.fetch_start_s - record.placed_s < PROBE_S + 0.5
        assert second.inventory(REMOTE) == ()


def test_a_full_store_takes_nothing_and_stops_nobody(wheel, right_tokens):
  """No member lends memory: every put is answered -200, 'no memory'."""
  with running_master() as master, joined(master.address) as cluster:
    (record,) = served(cluster, [ask()])
    assert record.output_tokens == right_tokens
    assert cluster.inventory(REMOTE) == ()
    (again,) = served(cluster, [ask()])
    assert again.reused_tokens == {'local_host': 40}


@pytest.mark.parametrize('num_bytes', [BLOCK_BYTES + 16, BLOCK_BYTES // 2 + 16])
def test_an_object_of_another_kind_is_no_block(wheel, right_tokens, num_bytes):
  """Of the right size with other bytes (another dtype), and of another."""
  with running_master() as master:
    with running_storage(master.address, 16 << 20):
      store = open_store(master.address)
      for key in ask().block_keys:
        slot = store._arena.take(1.0)[:num_bytes]
        slot[:] = 7
        assert store._calls.put(key, slot) == 0
      with joined(master.address) as cluster:
        (record,) = served(cluster, [ask()])
        assert record.output_tokens == right_tokens
        assert record.reused_tokens == {}
      with joined(master.address) as cluster:  # it was removed and put anew
        (record,) = served(cluster, [ask()])
        assert record.output_tokens == right_tokens
        assert record.reused_tokens == {'remote_store': 40}
      store.close()
