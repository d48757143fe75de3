# SPDX-License-Identifier: Apache-2.0
"""The smallest case of each bug that was found in the deciders, mended."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from lifecycle import close
from lifecycle import COSTS
from lifecycle import LAYERS
from lifecycle import LOOSE
from lifecycle import make_conductor
from lifecycle import make_device
from lifecycle import make_request
from lifecycle import make_virtual
from lifecycle import MODEL
from lifecycle import SPEC
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.advice import DropCopies
from mooncake_jax.conductor.advice import Replicate
from mooncake_jax.conductor.advice import SetRole
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.request import Placement
from mooncake_jax.serve import Decision
from mooncake_jax.serve import serve
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.store.master import Master

BLOCK_BYTES = SPEC.layout(MODEL).block_bytes
ONE = replace(SPEC, prefill_instances=1)


def prompt(step: int, length: int = 41) -> np.ndarray:
  return (np.arange(length) * step) % 50 + 2


def submit(cluster, name, tokens, prefill='prefill0', output=3, **kwargs):
  request = make_request(name, tokens, output, cluster.backend.now_s())
  placement = Placement(name, 0, prefill, **{'decode': 'decode0', **kwargs})
  cluster.submit(request, placement)
  return request


def run(cluster):
  events = []
  while not cluster.idle:
    events += cluster.step(None)
    cluster.check()
  return events


def fetched(events, name='b') -> PrefixFetched:
  return next(
    e for e in events if isinstance(e, PrefixFetched) and e.request_id == name
  )


def test_a_page_is_never_free_and_cached():
  """b shares blocks that d's end pushes out of the cache; b puts them again."""
  spec = replace(ONE, device_cache_tokens=40, lease_s=1e-3, chunk_tokens=8)
  cluster = make_virtual(spec)
  submit(cluster, 'a', prompt(1))
  run(cluster)
  submit(cluster, 'd', prompt(7))
  submit(cluster, 'b', prompt(1))
  run(cluster)


class _FirstFetchBreaks(VirtualBackend):
  """Only the first block of the first fetch arrives."""

  def __init__(self):
    costs = replace(COSTS, onload_latency_s=1.0)
    super().__init__(costs, LAYERS, spoil=self._break)
    self.broken = None

  def transfer(self, ops, priority, deadline_s, after=()):
    for op in ops:
      for end in (op.src, op.dst):
        assert '/device' not in getattr(end, 'segment', ''), op
    work_id = super().transfer(ops, priority, deadline_s, after)
    if priority == 0 and self.broken is None:
      self.broken = work_id, ops
    return work_id

  def _break(self, completion):
    if self.broken is None or completion.work_id != self.broken[0]:
      return completion
    ops = self.broken[1]
    status = tuple(
      'completed' if op.src == ops[0].src else 'failed' for op in ops
    )
    return replace(completion, status='failed', op_status=status)


def test_a_second_fetch_reads_nothing_from_device_memory():
  """The blocks that failed have come to the device meanwhile, by a's end."""
  spec = replace(ONE, device_cache_tokens=96, chunk_tokens=8)
  cluster = Cluster(spec, MODEL, _FirstFetchBreaks())
  submit(cluster, 'a', prompt(1))
  while len(cluster.inventory('prefill0')) < 3:
    cluster.step(None)
  submit(cluster, 'b', prompt(1))
  run(cluster)


def test_a_lost_ssd_is_offloaded_to_again():
  spec = replace(
    ONE,
    host_bytes=10 * BLOCK_BYTES,
    ssd_bytes=100 * BLOCK_BYTES,
    lease_s=0.05,
  )
  cluster = make_virtual(spec)
  cluster.lose_segment('prefill0/ssd')
  events = []
  for i in range(8):
    submit(cluster, f'z{i}', prompt(7 + i))
    events += run(cluster)
    cluster.step(cluster.backend.now_s() + 0.2)
  assert any(isinstance(e, BlocksStored) and e.tier == 'ssd' for e in events)


def test_a_lost_replica_is_repaired_from_host_memory():
  """Both instances have the blocks on their devices too."""
  cluster = make_virtual(replace(SPEC, device_cache_tokens=96))
  for name in SPEC.prefill_names:
    request = submit(cluster, name, prompt(1), name)
    run(cluster)
  cluster.lose_segment('prefill0')
  while cluster.backend.now_s() < 6:
    cluster.step(cluster.backend.now_s() + 0.5)
  replicas = cluster.master.peek(request.block_keys[0])
  assert 'prefill0' in {replica.segment for replica in replicas}


def test_own_blocks_do_not_use_up_the_plan_for_others():
  """Local 2 and fetch 2 bring 4, though the other has all on its device."""
  cluster = make_virtual(replace(SPEC, device_cache_tokens=96, lease_s=1e-3))
  submit(cluster, 'a', prompt(1, 33), 'prefill1')
  run(cluster)
  submit(cluster, 'h', prompt(1, 33)[:17])
  run(cluster)
  submit(cluster, 'z', prompt(7, 103))  # pushes h off the device
  run(cluster)
  submit(
    cluster,
    'b',
    prompt(1, 33),
    local_blocks=2,
    fetch_blocks=2,
    fetch_from='prefill1',
  )
  event = fetched(run(cluster))
  assert (event.local_tokens, event.remote_tokens) == (16, 16)


def test_a_queue_goes_on_when_its_first_leaves():
  """The first waits for a full decode instance; the next needs another."""
  cluster = make_virtual(replace(ONE, decode_pool_tokens=128))
  submit(cluster, 'long', prompt(1, 40), output=80)
  submit(cluster, 'head', prompt(1, 60), output=60)
  submit(cluster, 'b', prompt(1, 9), decode='decode1', output=2)
  events = []
  while cluster.backend.now_s() < 0.05:
    events += cluster.step(0.05)
  cancelled_s = cluster.backend.now_s()
  cluster.cancel('head')
  assert fetched(events + run(cluster)).started_s == cancelled_s


class _Adopting(VirtualBackend):
  """An earlier process left the blocks of one prompt on prefill1's SSD."""

  def adopt(self, segment):
    keys = make_request('q', prompt(1)).block_keys
    found = [(key, BLOCK_BYTES) for key in keys]
    return found if segment == 'prefill1/ssd' else []


def test_what_an_ssd_holds_is_known_to_the_first_placement():
  spec = replace(SPEC, ssd_bytes=100 * BLOCK_BYTES)
  cluster = Cluster(spec, MODEL, _Adopting(COSTS, LAYERS))
  request = make_request('b', prompt(1))
  _, journal = serve([request], make_conductor(spec), cluster)
  (decision,) = [e.decision for e in journal if isinstance(e, Decision)]
  assert isinstance(decision, Placement)
  assert decision.reused_blocks == 5


def test_who_leaves_a_queue_does_not_restart_its_first():
  loads = make_conductor().view.prefill
  loads.add('prefill0', 'a', 10.0, 0.0)
  loads.add('prefill0', 'b', 10.0, 0.0)
  loads.remove('prefill0', 'b', 9.0)
  assert loads.queue_s_I(9.0)[0] == 1.0


@pytest.mark.parametrize('queue_tokens', [100, 10, 0])
def test_who_fetches_is_not_overtaken_by_who_came_later(queue_tokens):
  """A queue, one that fetches while it waits, and a long one behind it.

  A queue of one chunk leaves the place behind it free until the prefix is
  there; without a queue the long one begins, but does not go on before.
  """
  cluster = make_virtual(replace(SPEC, prefill_pool_tokens=512))
  submit(cluster, 'warm', prompt(1))
  run(cluster)
  if queue_tokens:
    submit(cluster, 'queue', prompt(2, queue_tokens), prefill='prefill1')
  plan = {'fetch_blocks': 5, 'fetch_from': 'prefill0'}
  submit(cluster, 'fetches', prompt(1), prefill='prefill1', **plan)
  submit(cluster, 'later', prompt(3, 100), prefill='prefill1')
  done = [e.request_id for e in run(cluster) if isinstance(e, PrefillDone)]
  assert done == ['queue', 'fetches', 'later'][not queue_tokens :]


def test_a_retry_before_the_failure_was_heard_of():
  """News of the failed try come late: the new one still takes its place."""
  conductor = make_conductor(telemetry=Telemetry(delay_s=1.0))
  request = make_request('a', prompt(1))
  first = conductor.place(request, 0.0)
  assert isinstance(first, Placement)
  avoid = frozenset({first.prefill})
  conductor.observe(Failed(0.1, 'a', 0, first.prefill, 'lost', True))
  again = conductor.place(request, 0.1, 1, avoid)
  assert isinstance(again, Placement) and again.prefill != first.prefill
  assert len(conductor.view.placed) == 1
  conductor.observe(Finished(2.0, 'a', 1, again.decode, 5))
  conductor.place(make_request('b', prompt(2)), 3.5)
  conductor.view.check()
  assert [p.request.request_id for p in conductor.view.placed] == ['b']


def test_a_run_placed_by_a_role_that_is_no_more_is_refused():
  cluster = make_virtual(SPEC)
  cluster.set_role('prefill1', 'decode')
  submit(cluster, 'a', prompt(1), 'prefill1')
  submit(cluster, 'b', prompt(1), 'prefill0', decode='prefill1')
  reasons = {e.request_id: e for e in run(cluster) if isinstance(e, Failed)}
  assert reasons['a'].instance == 'prefill1' and reasons['a'].retryable
  assert set(reasons) == {'a'}


def test_who_waited_for_decode_pages_may_have_changed_its_role():
  cluster = make_virtual(replace(SPEC, decode_pool_tokens=128))
  submit(cluster, 'long', prompt(1, 40), output=80)
  submit(cluster, 'head', prompt(1, 60), 'prefill1', output=60)
  cluster.cancel('head')
  cluster.set_role('prefill1', 'decode')
  events = run(cluster)
  assert any(isinstance(e, Finished) for e in events)


def test_an_instance_that_is_still_asked_or_written_to_keeps_its_role():
  """A probe whose run was cancelled, and a copy sent there."""
  spec = replace(SPEC, mooncake_bytes=9 * BLOCK_BYTES)
  cluster = make_virtual(spec)
  submit(cluster, 'a', prompt(1))
  run(cluster)
  submit(cluster, 'b', prompt(2), 'prefill1')
  cluster.replicate(cluster.inventory('prefill0'), 'prefill0', 'prefill1')
  cluster.cancel('b')
  cluster.set_role('prefill1', 'decode')
  run(cluster)
  assert 'prefill1' in cluster.decode


def test_a_block_dropped_below_is_not_offloaded_beside_its_old_copy():
  """Its lease there has ended, and nobody has looked since."""
  master = Master(lease_s=1.0, high_watermark=0.5)
  master.mount('a/ssd', 40, 'ssd')
  master.mount('a', 40, lower='a/ssd')
  put = master.put_start_chain((b'k',), 0, 1, 10, 'a', 0.0)
  master.put_end_chain(put.replicas)
  start = master.copy_start(b'k', 'a', 'a/ssd', 0.0)
  assert start.task is not None
  master.copy_end(start.task, 0.0)
  master.get_replicas(b'k', 0.0)
  assert master.drop(b'k', 'a/ssd', 0.0) == ()
  more = master.put_start_chain((b'x', b'y'), 0, 2, 10, 'a', 2.0)
  master.put_end_chain(more.replicas)
  master.victims('a', 2.0)
  master.check()


class _Misadvised(Conductor):
  """Advises what was possible before two instances went."""

  def advise(self, now_s):
    keys = make_request('a', prompt(1)).block_keys
    return [
      Replicate(keys, 'prefill0', 'prefill1'),
      DropCopies(keys, 'prefill1'),
      SetRole('prefill1', 'decode'),
      SetRole('prefill0', 'decode'),
      SetRole('decode0', 'prefill'),
    ]


def test_advice_that_is_no_longer_possible_is_left():
  cluster = make_virtual(SPEC)
  cluster.lose('prefill1')
  cluster.lose('decode1')
  conductor = _Misadvised(ConductorSpec(), SPEC, MODEL, COSTS, LOOSE)
  conductor.drain('prefill1')
  conductor.drain('decode1')
  records, _ = serve([make_request('a', prompt(1))], conductor, cluster)
  assert [r.outcome for r in records] == ['completed']
  assert 'prefill0' in cluster.prefill and 'decode0' in cluster.decode


def _explain(conductor, now_s):
  request = make_request('a0', prompt(1))  # one that is placed already
  explained = conductor.explain(request, now_s).decision
  twin = copy.deepcopy(conductor)
  assert explained == twin.place(request, now_s)


@pytest.mark.parametrize('asks', [Conductor.advise, _explain])
def test_asking_changes_no_placement(asks):
  """A journal has no advice and no explanations in it, nor has its replay."""
  told = []
  for ask in (lambda conductor, now_s: None, asks):
    conductor = make_conductor(telemetry=Telemetry(delay_s=0.5))
    for i in range(4):
      conductor.place(make_request(f'a{i}', prompt(1 + i)), 0.0)
    ask(conductor, 3.0)  # the heads are overdue by then
    conductor.observe(Failed(3.0, 'a3', 0, 'prefill0'))
    ask(conductor, 3.6)  # and this has come
    told.append(conductor.place(make_request('b', prompt(9)), 3.55))
  assert told[0] == told[1]


@pytest.mark.parametrize('make', [make_virtual, make_device])
def test_what_a_run_before_it_computes_is_not_computed_again(make):
  """Both leave the queue before the first has computed anything."""
  cluster = make(SPEC)
  try:
    submit(cluster, 'a', prompt(1))
    submit(cluster, 'other', prompt(3))
    submit(cluster, 'b', prompt(1), local_blocks=5)
    events = run(cluster)
  finally:
    if make is make_device:
      close(cluster)
  assert fetched(events, 'a').local_tokens == 0
  assert fetched(events, 'b').local_tokens == 40


def test_nobody_waits_for_what_a_run_that_failed_was_to_compute():
  cluster = make_virtual(SPEC)
  submit(cluster, 'a', prompt(1))
  submit(cluster, 'b', prompt(1), local_blocks=5)
  cluster.cancel('a')
  events = run(cluster)
  assert fetched(events, 'b').local_tokens == 0
  assert any(isinstance(e, Finished) for e in events)
