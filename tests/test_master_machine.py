# SPDX-License-Identifier: Apache-2.0
"""The Master against a naive model: thousands of random steps.

Two hosts, one of them over an SSD, and a far store; puts, chains, copies,
moves, offloads, removals, pins, quotas, time, timeouts, segments that leave,
get lost and come back, and readers whose leases overlap.
"""

from functools import partial
from itertools import takewhile
import math

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from mooncake_jax.blocks.segments import owner
from mooncake_jax.store.master import Master
from mooncake_jax.store.objects import CONDEMNED
from mooncake_jax.store.objects import Medium
from tests.master_model import Model

LEASE_S, TIMEOUT_S, SOFT_S = 3.0, 8.0, 15.0
KEYS = [bytes([i]) for i in range(10)]
CHAIN = tuple(KEYS[:6])
PLACES: dict[str, tuple[int, Medium, str | None]] = {
  'a/ssd': (60, 'ssd', None),
  'a': (45, 'host', 'a/ssd'),
  'b': (40, 'host', None),
  'far': (50, 'remote', None),
}
keys = st.sampled_from(KEYS)
hosts = st.sampled_from(['a', 'b'])
places = st.sampled_from(sorted(PLACES))
tenants = st.sampled_from(['x', 'y'])
pins = st.sampled_from(['none'] * 6 + ['soft', 'soft', 'hard'])
ends = st.sampled_from([True, True, True, False])


class MasterMachine(stateful.RuleBasedStateMachine):
  """Each rule calls the Master and tells the model what came of it."""

  def __init__(self):
    super().__init__()
    self.master = Master(
      LEASE_S, high_watermark=0.8, eviction_ratio=0.1, put_timeout_s=TIMEOUT_S
    )
    self.model = Model(LEASE_S, TIMEOUT_S)
    self.master.set_quota('y', 40)
    self.model.quotas['y'] = 40
    for name in PLACES:
      self.mount(name)

  @stateful.rule(name=places)
  def mount(self, name):
    if name not in self.model.places:
      capacity, medium, lower = PLACES[name]
      lower = lower if lower in self.model.places else None
      lower = lower if lower not in self.model.draining else None
      self.master.mount(name, capacity, medium, lower=lower)
      self.model.places[name] = (capacity, medium, lower)

  @stateful.rule(
    key=keys,
    place=places,
    size=st.sampled_from([5, 10]),
    tenant=tenants,
    pin=pins,
    end=ends,
  )
  def put_start(self, key, place, size, tenant, pin, end):
    model = self.model
    if place not in model.places:
      return
    was_here = model.here(key, place)
    start = self.master.put_start(
      key, size, place, model.now, pin=pin, soft_pin_ttl_s=SOFT_S, tenant=tenant
    )
    model.evict(start.evicted, place, (), tenant)
    assert not (start.stored and start.replica)
    if start.replica is not None:
      model.open(start.replica, size, tenant)
      self.end_puts([start.replica] if end else [])
    elif start.stored:
      assert was_here is not None and was_here in model.live
      model.live[was_here].leaves = None
    self.after_put(start.refusal, place, size, tenant)
    if start.stored or start.replica is not None:
      self.model.pin_longer([key], pin, SOFT_S)

  @stateful.rule(
    place=hosts,
    first=st.integers(0, 5),
    count=st.integers(1, 6),
    tenant=tenants,
    pin=pins,
    end=ends,
  )
  def put_chain(self, place, first, count, tenant, pin, end):
    model, last = self.model, min(first + count, 6)
    if place not in model.places:
      return
    made = self.master.put_start_chain(
      CHAIN,
      first,
      last,
      10,
      place,
      model.now,
      pin=pin,
      soft_pin_ttl_s=SOFT_S,
      tenant=tenant,
    )
    model.evict(made.evicted, place, CHAIN[:last], tenant)
    for replica, index in zip(made.replicas, made.indices, strict=True):
      assert replica.key == CHAIN[index] and first <= index < made.stop
      model.open(replica, 10, tenant)
    for i in range(first, last):
      here = model.here(CHAIN[i], place)
      assert here is not None or i >= made.stop
      if here is not None and place not in model.draining:
        model.live[here].leaves = None
    self.end_puts(made.replicas if end else ())
    assert (made.stop == last) == (made.refusal == '')
    self.after_put(made.refusal, place, 10, tenant)
    self.model.pin_longer(CHAIN[first : made.stop], pin, SOFT_S)

  def end_puts(self, replicas):
    assert all(self.master.put_end_chain(replicas))
    for replica in replicas:
      self.model.live[replica].open = False

  def after_put(self, refusal, place, size, tenant):
    model = self.model
    quota = model.quotas.get(tenant, math.inf)
    assert model.charged(tenant) <= quota
    free = model.places[place][0] - model.used(place)
    if refusal == 'draining':
      assert place in model.draining
    elif refusal == 'quota':
      assert model.charged(tenant) + size > quota
    elif refusal == 'offload':
      assert free < size
    elif refusal:
      assert free < size
      # Nothing that may go is spared while a put is refused for room.
      going = [r for r in model.live if r.segment == place and model.may_go(r)]
      spared = sum(model.live[r].size for r in going if r.key not in CHAIN)
      assert free + spared < size, (refusal, going)

  @stateful.rule(key=keys, pin=pins)
  def set_pin(self, key, pin):
    self.master.pin([key], pin, self.model.now, SOFT_S)
    if self.model.of(key):
      self.model.pins.pop(key, None)
      self.model.pin_longer([key], pin, SOFT_S)

  @stateful.rule(data=st.data(), publish=st.booleans())
  def finish_put(self, data, publish):
    model = self.model
    under_way = [r for r, h in model.live.items() if h.open]
    under_way = [r for r in under_way if r not in model.tasks]
    if not under_way:
      return
    replica = data.draw(st.sampled_from(under_way))
    if not publish:
      self.master.put_revoke(replica.key, replica)
      model.end(replica)
    elif self.master.put_end(replica.key, replica):
      model.live[replica].open = False
    else:
      assert replica.segment in model.draining
      model.end(replica)

  @stateful.rule(count=st.integers(1, 6), own=hosts, budget=st.integers(0, 4))
  def get_chain(self, count, own, budget):
    model = self.model
    if own not in model.places:
      return
    found = self.master.get_chain(
      CHAIN[:count], model.now, own, max_remote_blocks=budget
    )
    left = budget
    for key, replica in zip(CHAIN, found):
      assert replica in model.readable(key)
      near = replica.segment.split('/')[0] == own
      medium = ('device', 'host', 'ssd', 'remote').index(
        model.places[replica.segment][1]
      )
      distance = 0 if replica.segment == own else 1 if near else 2
      assert {(medium, distance)} == model.best(key, own, left > 0)
      left -= replica in model.kept(key) and not any(
        r.segment.split('/')[0] == own for r in model.readable(key)
      )
      model.leases[key] = model.now + LEASE_S
    if len(found) < count:
      assert model.best(CHAIN[len(found)], own, left > 0) == {(9, 9)}

  @stateful.rule(key=keys)
  def get(self, key):
    found = self.master.get_replicas(key, self.model.now)
    assert set(found) == self.model.readable(key)
    if found:
      self.model.leases[key] = self.model.now + LEASE_S

  @stateful.rule(key=keys, src=places, dst=places, move=st.booleans())
  def copy(self, key, src, dst, move):
    model = self.model
    if src == dst or not {src, dst} <= set(model.places):
      return
    source, there = model.here(key, src), model.here(key, dst)
    start = self.master.copy_start(key, src, dst, model.now, move)
    if start.refusal == 'source':
      assert source is None or not model.live[source].readable
    elif start.task is not None:
      assert source is not None
      model.evict(start.evicted, dst, (key,))
      size = model.live[source].size
      model.open(start.task.dst, size, None)
      assert start.task.src == source and start.task.size_bytes == size
      model.tasks[start.task.dst] = start.task
    elif start.stored:
      assert source is not None and there is not None
      model.live[there].leaves = None
      if not model.live[there].open:
        if move:
          self.part(source, start.evicted)

  def part(self, source, evicted):
    """A copy is to go: at once, or when nothing holds its block."""
    model, key = self.model, source.key
    if evicted:
      assert [gone[:2] for gone in evicted] == [(key, source)]
      assert not model.leased(key) and not model.being_written(key)
      model.end(source)
    else:
      assert model.leased(key) or model.being_written(key)
      model.live[source].leaves = model.leases.get(key, -1.0)

  @stateful.rule(data=st.data(), ok=st.booleans())
  def finish_copy(self, data, ok):
    model = self.model
    if not model.tasks:
      return
    task = model.tasks[data.draw(st.sampled_from(list(model.tasks)))]
    if not ok:
      self.master.copy_revoke(task)
      model.end(task.dst)
      return
    end = self.master.copy_end(task, model.now)
    if not end.published:
      assert task.dst.segment in model.draining
      ((key, replica, _),) = end.evicted
      assert (key, replica) == (task.dst.key, task.dst)
      model.end(task.dst)
      return
    model.live[task.dst].open = False
    del model.tasks[task.dst]
    if task.kind == 'move' and model.live[task.src].readable:
      model.live[task.dst].tenant = model.live[task.src].tenant
      model.live[task.src].tenant = None
      self.part(task.src, end.evicted)

  @stateful.rule()
  def offload(self):
    model = self.model
    if 'a' not in model.places:
      return
    lower = model.places['a'][2]
    due = self.master.victims('a', model.now)
    assert lower is not None or not due.tasks
    if lower is not None:
      # One by one: what went below for the first may be of the second.
      for evicted in due.evicted:
        assert model.live[evicted.replica].readable
        assert not model.leased(evicted.key)
        model.end(evicted.replica)
    for task in due.tasks:
      assert model.live[task.src].readable and not model.leased(task.src.key)
      model.open(task.dst, model.live[task.src].size, None)
      model.tasks[task.dst] = task
    free = 45 - model.used('a')
    for replica in model.live:
      # No room below for it: it may go without.
      if replica.segment == 'a' and lower is not None and free < 14:
        copy = self.master._find(replica)
        assert copy is not None
        model.live[replica].condemned |= copy.state == CONDEMNED

  @stateful.rule(key=keys)
  def remove(self, key):
    model = self.model
    gone = self.master.remove(key, model.now)
    if gone is None:
      assert model.leased(key) or model.being_written(key)
    else:
      assert set(gone) == set(model.of(key))
      assert not (model.leased(key) or model.being_written(key))
      for replica in gone:
        model.end(replica)

  @stateful.rule(pattern=st.sampled_from(['^0[0-3]$', '[02468]$', '^ff']))
  def remove_regex(self, pattern):
    model = self.model
    removed = self.master.remove_regex(pattern, model.now)
    for key in removed.refused:
      assert model.leased(key) or model.being_written(key)
    for key in {gone.key for gone in removed.evicted}:
      assert not (model.leased(key) or model.being_written(key))
      for replica in model.of(key):
        model.end(replica)

  @stateful.rule(seconds=st.sampled_from([0.5, 1.0, 1.0, 4.0, 9.0]))
  def pass_time(self, seconds):
    self.model.now += seconds

  @stateful.rule()
  def reap(self):
    model = self.model
    gone = {e.replica for e in self.master.reap(model.now)}
    for replica in gone:
      held = model.live[replica]
      if held.open:
        assert model.now - held.since > TIMEOUT_S
      else:
        assert held.leaves is not None and held.leaves < model.now
      model.end(replica)
    for replica, held in model.live.items():
      assert not (held.open and model.now - held.since > TIMEOUT_S)
      if held.leaves is not None and held.leaves < model.now:
        assert model.being_written(replica.key)
    model.keep_only(self.master.segments())

  @stateful.precondition(lambda self: self.model.now > 10)
  @stateful.rule(name=places)
  def unmount(self, name):
    model = self.model
    if name not in model.places:
      return
    was, first = model.at(name), name not in model.draining
    gone = self.master.unmount(name, model.now)
    model.draining.add(name)
    for _, replica, _ in gone.evicted:
      assert not model.leased(replica.key) or not first
      model.end(replica)
    if first:
      model.cut_off(name)
      for replica in was:
        if replica in model.live:
          model.live[replica].leaves = model.leases.get(replica.key, -1.0)
      assert set(gone.lost) == {r.key for r in was if not model.readable(r.key)}
      assert set(gone.kept) == {r.key for r in was if model.readable(r.key)}
    assert gone.waiting == sum(r.segment == name for r in model.live)
    model.keep_only(self.master.segments())

  @stateful.precondition(lambda self: self.model.now > 10)
  @stateful.rule(name=places)
  def lose(self, name):
    model = self.model
    if name not in model.places:
      return
    was = model.at(name)
    gone = self.master.lose(name)
    for replica in [e.replica for e in gone.evicted]:
      assert model.tasks[replica].src.segment == name
      model.end(replica)
    for replica in [r for r in model.live if r.segment == name]:
      model.end(replica)
    model.cut_off(name)
    assert set(gone.lost) == {r.key for r in was if not model.readable(r.key)}
    assert set(gone.kept) == {r.key for r in was if model.readable(r.key)}
    model.keep_only(self.master.segments())

  @stateful.invariant()
  def agrees(self):
    model, master = self.model, self.master
    master.check()
    for key in KEYS:
      assert set(master.peek(key)) == model.readable(key)
      assert master.exists(key) == bool(model.readable(key))
    for group in {owner(name) for name in model.places}:
      at_hand = takewhile(partial(model.has, group), KEYS)
      assert master.num_at(group, KEYS) == len([*at_hand])
    for name in model.places:
      assert master.used_bytes(name) == model.used(name)
      assert set(master.inventory(name)) == {r.key for r in model.at(name)}
    for replica, held in model.live.items():
      valid = master.is_valid(replica)
      assert valid == (not held.open)
      assert master.num_valid([replica, replica]) == 2 * valid
    for wanting in master.under_replicated(model.now, min_heat=0):
      assert len(model.readable(wanting.key)) == wanting.num_replicas
      assert wanting.num_replicas < wanting.num_wanted


TestMasterMachine = MasterMachine.TestCase
TestMasterMachine.settings = hypothesis.settings(
  max_examples=120, stateful_step_count=80, deadline=None
)
