# SPDX-License-Identifier: Apache-2.0
"""Random clusters, requests and failures, and what must hold of any of them.

`python tests/fuzz.py FIRST_SEED COUNT` runs more of them than the tests do.
"""

from collections import Counter
from dataclasses import replace
import math
import random
import sys
import traceback
from typing import get_args

from lifecycle import COSTS
from lifecycle import LOOSE
from lifecycle import MODEL
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster import Cluster
from mooncake_jax.cluster import REAP_EVERY_S
from mooncake_jax.cluster_members import Role
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.costs.model import LINKS
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import KVArrived
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.serve import Decision
from mooncake_jax.serve import replay
from mooncake_jax.serve import serve
from mooncake_jax.sim.remote_store import RemoteStore
from mooncake_jax.sim.virtual import VirtualBackend
from mooncake_jax.slo import SLO
from random_clusters import NUM_REQUESTS
from random_clusters import random_beliefs
from random_clusters import random_requests
from random_clusters import random_rules
from random_clusters import random_spec
from shadow import Shadow

ROLES: tuple[Role, ...] = get_args(Role)


class Flaky(VirtualBackend):
  """Links of random latencies; spoils a share of all works."""

  def __init__(
    self, spec: ClusterSpec, share: float, seed: int, store: RemoteStore
  ):
    rng = random.Random(seed)
    latencies = {
      f'{link}_latency_s': 10 ** rng.uniform(-5, -1.3) for link in LINKS
    }
    costs = replace(COSTS, **latencies)
    super().__init__(
      costs,
      spec.layers_of_stages(MODEL),
      partners=spec.partners,
      boundary_s=rng.choice((0.0, 1e-3)),
      store=store,
      spoil=self._break,
    )
    self._share, self._rng = share, rng
    self.shadow = Shadow(MODEL.num_layers, spec.page_tokens)
    # Lost bytes can't be read; of other dropped ones only leases tell.
    self.drops_are_read = False

  def prefill(self, instance, work, after=()):
    work_id = super().prefill(instance, work, after)
    self.shadow.chunk(work_id, instance, work)
    return work_id

  def decode(self, instance, batch, max_steps):
    work_id = super().decode(instance, batch, max_steps)
    self.shadow.decode(work_id, instance, batch)
    return work_id

  def transfer(self, ops, priority, deadline_s, after=()):
    for op in ops:
      for end in (op.src, op.dst):
        segment = getattr(end, 'segment', '')
        assert not segment or medium(segment) != 'device', op
    work_id = super().transfer(ops, priority, deadline_s, after)
    self.shadow.transfer(work_id, ops)
    return work_id

  def drop(self, replicas):
    assert all(medium(r.segment) != 'device' for r in replicas), replicas
    self.shadow.drop(replicas)
    if not self.drops_are_read:
      super().drop(replicas)

  def progress(self):
    told = super().progress()
    for completion in told:
      self.shadow.ended(completion)
    return told

  def _break(self, completion):
    completion = self._outcome(completion)
    self.shadow.ended(completion)
    return completion

  def _outcome(self, completion):
    if not completion.done or self._rng.random() >= self._share:
      return completion
    status = self._rng.choice(('failed', 'timeout', 'cancelled'))
    ops = tuple(
      status if self._rng.random() < 0.5 else s for s in completion.op_status
    )
    return replace(
      completion, status=status, error='spoilt', steps=(), op_status=ops
    )


class Trial:
  """One random cluster under random failures, checked at every event."""

  def __init__(self, seed: int):
    rng = self.rng = random.Random(seed)
    self.spec = random_spec(rng)
    self.requests = random_requests(self.spec, seed)
    self.slo = rng.choice((LOOSE, SLO(ttft_s=0.05, tbt_s=0.003)))
    self.rules = random_rules(rng)
    pairs = self.spec.prefill_instances
    if self.spec.stages == 1 and self.spec.streaming != 'layers':
      self.spec = replace(
        self.spec, colocated=True, decode_instances=pairs, absent=()
      )
      self.rules = replace(self.rules, roles=None)
    self.differing = random_beliefs(rng, self.spec)
    self.conductor = self.make_conductor()
    self.store = self.others_store()
    broken = rng.choice((0, 0, 0.02, 0.2))
    self.backend = Flaky(self.spec, broken, seed, self.store)
    recheck = self.conductor.keeps_tbt if self.rules.checks_late else None
    self.cluster = Cluster(self.spec, MODEL, self.backend, recheck, COSTS)
    self.loss = rng.choice((0, 0, 0.01, 0.05))
    self.cancels = rng.choice((0, 0.01, 0.1))
    self.moves = rng.choice((0, 0, 0.02, 0.1))
    self.backend.drops_are_read = not (
      self.loss or self.moves or self.rules.replication or self.rules.roles
    )
    for request in self.requests:
      self.backend.shadow.know(request, self.spec.block_size_tokens)
    self.ended: Counter[tuple[str, int]] = Counter()

  def make_conductor(self) -> Conductor:
    return Conductor(
      self.rules, self.spec, MODEL, COSTS, self.slo, self.differing
    )

  def others_store(self) -> RemoteStore:
    """Has heads of some prompts, and loses blocks without a word."""
    self.gone: set[BlockKey] = set()
    self.silent_loss = self.rng.choice((0, 0.05))
    heads = [
      r.block_keys[: self.rng.randrange(9)]
      for r in self.requests
      if self.rng.random() < 0.3
    ]
    return RemoteStore(key for head in heads for key in head)

  def run(self) -> None:
    records, journal = serve(
      self.requests, self.conductor, self.cluster, on_event=self.on_event
    )
    assert not [r for r in records if r.outcome == 'running']
    asked = {r.request_id: r.max_output_tokens for r in self.requests}
    for record in records:
      if record.outcome == 'completed':
        assert record.num_output_tokens == asked[record.request_id], record
    assert self.cluster.idle
    self.settle()
    self.cluster.check()
    late_s = self.spec.request_timeout_s + self.rules.telemetry.delay_s
    self.conductor._hear(self.backend.now_s() + late_s)
    self.check_beliefs()
    made = [e.decision for e in journal if isinstance(e, Decision)]
    for decision in made:
      self.check_plan(decision)
    assert replay(journal, self.requests, self.make_conductor()) == made

  def settle(self) -> None:
    """Lets leases run out, so that what is leaving has left."""
    rounds = 0
    while rounds < 3 or not self.cluster.idle:
      rounds += 1
      until_s = self.backend.now_s() + self.spec.lease_s + 2 * REAP_EVERY_S
      for event in self.cluster.step(until_s):
        assert not isinstance(event, RequestEvent), event
        self.conductor.observe(event)

  def on_event(self, event: Event) -> None:
    self.cluster.check()
    if isinstance(event, RequestEvent):
      run = event.request_id, event.attempt
      assert not self.ended[run], event
      self.ended[run] += isinstance(event, ENDS)
    self.check_contents(event)
    if isinstance(event, BlocksStored) and event.tier == 'remote':
      there = {key for key in event.keys if self.store.has(key)}
      assert there | self.gone >= {*event.keys}
    if self.rng.random() < self.silent_loss:
      keys = self.rng.choice(self.requests).block_keys
      self.gone.update(keys)
      self.store.evict(keys)
    if self.rng.random() < self.cancels:
      self.cluster.cancel(f'r{self.rng.randrange(NUM_REQUESTS)}')
    if self.rng.random() < self.loss:
      name = self.rng.choice(self.spec.prefill_names)
      segments = [name]
      segments += [ssd_segment(name)] if self.spec.ssd_bytes else []
      segments += [REMOTE] if self.spec.mooncake_bytes else []
      if name in self.cluster.master.segments():
        self.cluster.lose_segment(self.rng.choice(segments))
    if self.rng.random() < self.moves:
      self.move()
    self.cluster.check()

  def move(self) -> None:
    """An instance comes, goes or changes; blocks are sent around.

    The last of a role stays.
    """
    cluster, rng = self.cluster, self.rng
    name = rng.choice([*cluster.prefill, *cluster.decode])
    gone = name in cluster._members._gone
    segments = [s for s in cluster.master.segments() if medium(s) != 'device']
    keys = rng.choice(self.requests).block_keys
    match rng.choice(('instance', 'instance', 'role', 'replicate', 'drop')):
      case 'instance' if gone:
        cluster.join(name)
      case 'instance' if cluster._members._stay_without(name):
        rng.choice((cluster.lose, cluster.drain))(name)
      case 'role':
        role = rng.choice(ROLES)
        if not cluster.role_refusal(name, role):
          cluster.set_role(name, role)
      case 'replicate' if len(segments) > 1:
        src, dst = rng.sample(segments, 2)
        cluster.replicate(keys, owner(src), dst)
      case 'drop' if segments:
        cluster.drop(keys, rng.choice(segments))

  def check_contents(self, event: Event) -> None:
    """What is published, handed over or emitted is right."""
    shadow, master = self.backend.shadow, self.cluster.master
    match event:
      case BlocksStored():
        for key in event.keys:
          for replica in master.peek(key):
            if medium(replica.segment) not in ('device', 'remote'):
              assert shadow.is_right(replica), replica
      case TokensEmitted():
        assert shadow.wrong_tokens.isdisjoint(event.emitted.tries)
      case KVArrived():
        run = self.cluster._flow.runs.get((event.request_id, event.attempt))
        if run is not None and run.decode_pages:
          n = run.request.num_prompt_tokens
          instance, pages = run.placement.decode, run.decode_pages
          assert shadow.holds(run.request, instance, pages, n), run

  def check_plan(self, plan: Placement | Rejection) -> None:
    """It reuses no more than there may be, and is a number everywhere."""
    assert 0 <= plan.ttft_s < math.inf and 0 <= plan.tbt_s < math.inf, plan
    if isinstance(plan, Rejection):
      return
    (request,) = (r for r in self.requests if r.request_id == plan.request_id)
    most = (request.num_prompt_tokens - 1) // self.spec.block_size_tokens
    parts = plan.local_blocks, plan.fetch_blocks, plan.store_blocks
    assert min(parts) >= 0 and sum(parts) <= most, plan

  def check_beliefs(self) -> None:
    """The index is the store's inventory; nothing is thought under way."""
    restarted = PrefixIndex()
    for event in self.cluster.inventories():
      restarted.observe(event)
    heard = () if self.rules.telemetry.loss else (self.conductor.view.index,)
    for index in (restarted, *heard):
      assert len(index) == len(restarted)
      for segment in self.cluster.master.segments():
        truth = set(self.cluster.inventory(segment))
        assert truth == set(index.inventory(owner(segment), medium(segment)))
    view = self.conductor.view
    view.check()
    assert not len(view.prefill) + len(view.decode) + len(view.placed)


if __name__ == '__main__':
  for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
    try:
      Trial(seed).run()
    except Exception as error:
      where = traceback.extract_tb(error.__traceback__)[-1]
      name = where.filename.rsplit('/', 1)[-1]
      print(seed, f'{name}:{where.lineno}', repr(error)[:200], flush=True)
