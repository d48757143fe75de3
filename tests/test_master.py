# SPDX-License-Identifier: Apache-2.0
"""The Master against what it promises, by example and by random walk."""

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
import pytest

from mooncake_jax.backend import Replica
from mooncake_jax.store.master import Master
from mooncake_jax.store.master import PutStart

KEYS = [bytes([i]) for i in range(12)]


def _make_master(capacity=40, segments=('a', 'b'), **kwargs):
  master = Master(
    **{'lease_s': 10.0, 'high_watermark': 1.0, 'eviction_ratio': 0.0, **kwargs}
  )
  for name in segments:
    master.mount(name, capacity)
  return master


def _put(master, key, segment='a', size=10, now_s=0.0):
  start = master.put_start(key, size, segment, now_s)
  if start.replica is not None:
    master.put_end(key, start.replica)
  return start


def _written(start: PutStart) -> Replica:
  assert start.replica is not None, start
  return start.replica


def test_a_block_is_not_readable_before_put_end():
  master = _make_master()
  start = master.put_start(KEYS[0], 10, 'a', 0.0)
  assert master.get_replicas(KEYS[0], 0.0) == ()
  master.put_end(KEYS[0], _written(start))
  assert master.get_replicas(KEYS[0], 0.0) == (start.replica,)


def test_a_duplicate_put_succeeds_and_keeps_the_old_replica():
  master = _make_master()
  first = _put(master, KEYS[0])
  again = master.put_start(KEYS[0], 10, 'a', 0.0)
  assert again.stored and again.replica is None
  assert master.peek(KEYS[0]) == (first.replica,)


def test_a_revoked_put_frees_its_room_and_was_never_there():
  master = _make_master(capacity=10)
  start = master.put_start(KEYS[0], 10, 'a', 0.0)
  master.put_revoke(KEYS[0], _written(start))
  assert not master.exists(KEYS[0])
  assert _put(master, KEYS[1]).replica is not None


def test_the_least_recently_used_tail_goes_first():
  master = _make_master(capacity=40)
  for key in KEYS[:4]:
    _put(master, key)
  master.touch(KEYS[:4], 'a')
  assert [e.key for e in _put(master, KEYS[4]).evicted] == [KEYS[3]]
  assert [e.key for e in _put(master, KEYS[5]).evicted] == [KEYS[2]]


def test_a_leased_block_is_neither_evicted_nor_removed_until_it_ends():
  master = _make_master(capacity=20)
  _put(master, KEYS[0])
  _put(master, KEYS[1])
  master.get_replicas(KEYS[0], now_s=1.0)
  master.get_replicas(KEYS[1], now_s=2.0)
  start = master.put_start(KEYS[2], 10, 'a', 11.0)
  assert start.replica is None and start.evicted == ()
  assert master.remove(KEYS[0], 11.0) is None
  start = master.put_start(KEYS[2], 10, 'a', 11.5)
  assert [e.key for e in start.evicted] == [KEYS[0]]


def test_probing_does_not_renew_a_lease():
  master = _make_master(capacity=10)
  _put(master, KEYS[0])
  master.exists(KEYS[0])
  assert _put(master, KEYS[1]).evicted


def test_what_was_read_counts_if_it_is_still_there_whatever_the_lease():
  master = _make_master(capacity=10)
  replica = _written(_put(master, KEYS[0]))
  master.get_replicas(KEYS[0], 0.0)
  assert master.is_valid(replica)
  _put(master, KEYS[1], now_s=10.1)  # takes its place
  assert not master.is_valid(replica)


def test_an_unmounted_segment_loses_its_replicas_only():
  master = _make_master()
  _put(master, KEYS[0], 'a')
  second = _put(master, KEYS[0], 'b').replica
  _put(master, KEYS[1], 'a')
  gone = master.unmount('a')
  assert (gone.lost, gone.kept) == ((KEYS[1],), (KEYS[0],))
  assert master.peek(KEYS[0]) == (second,)
  assert not master.exists(KEYS[1])
  master.check()


def test_a_chain_is_not_evicted_for_its_own_tail():
  master = _make_master(capacity=20)
  _put(master, KEYS[0])
  _put(master, KEYS[1])
  start = master.put_start(KEYS[2], 10, 'a', 0.0, keep=KEYS[:3])
  assert start == type(start)()
  start = master.put_start(KEYS[3], 10, 'a', 0.0, keep=KEYS[:1])
  assert [e.key for e in start.evicted] == [KEYS[1]]


def test_a_block_larger_than_the_segment_evicts_nothing():
  master = _make_master(capacity=40)
  _put(master, KEYS[0])
  start = master.put_start(KEYS[1], 50, 'a', 100.0)
  assert start == type(start)()


def test_evicting_is_batched():
  master = _make_master(capacity=100, eviction_ratio=0.3)
  for key in KEYS[:10]:
    _put(master, key)
  assert len(_put(master, KEYS[10]).evicted) == 3


@pytest.mark.parametrize(
  'kwargs',
  [{'lease_s': 0.0}, {'high_watermark': 1.5}, {'eviction_ratio': -0.1}],
)
def test_a_bad_setting_is_named(kwargs):
  with pytest.raises(ValueError, match=next(iter(kwargs))):
    Master(**kwargs)


class MasterMachine(stateful.RuleBasedStateMachine):
  """Random puts, ends, revokes, gets and time against a naive model."""

  def __init__(self):
    super().__init__()
    self.master = _make_master(capacity=45, lease_s=3.0, put_timeout_s=1e9)
    self.now_s = 0.0
    self.open = []  # (key, replica) between put_start and put_end
    self.readable = {}  # replica -> key
    self.leases = {}  # key -> end

  @stateful.rule(
    key=st.sampled_from(KEYS),
    segment=st.sampled_from('ab'),
    size=st.sampled_from([5, 10, 20]),
  )
  def put_start(self, key, segment, size):
    start = self.master.put_start(key, size, segment, self.now_s)
    for evicted in start.evicted:
      assert self.leases.get(evicted.key, -1.0) < self.now_s
      assert self.readable.pop(evicted.replica) == evicted.key
      assert all(key != evicted.key for key, _ in self.open)
    here = {k for r, k in self.readable.items() if r.segment == segment}
    here |= {k for k, r in self.open if r.segment == segment}
    assert start.stored == (key in here)
    if start.replica is not None:
      self.open.append((key, start.replica))

  @stateful.precondition(lambda self: self.open)
  @stateful.rule(data=st.data(), publish=st.booleans())
  def put_finish(self, data, publish):
    index = data.draw(st.integers(0, len(self.open) - 1))
    key, replica = self.open.pop(index)
    if publish:
      assert self.master.put_end(key, replica)
      self.readable[replica] = key
    else:
      self.master.put_revoke(key, replica)

  @stateful.rule(key=st.sampled_from(KEYS))
  def get(self, key):
    found = self.master.get_replicas(key, self.now_s)
    assert set(found) == {r for r, k in self.readable.items() if k == key}
    if found:
      self.leases[key] = self.now_s + 3.0

  @stateful.rule(key=st.sampled_from(KEYS))
  def remove(self, key):
    gone = self.master.remove(key, self.now_s)
    if gone is None:
      assert self.leases.get(key, -1.0) >= self.now_s or any(
        k == key for k, _ in self.open
      )
    else:
      for replica in gone:
        assert self.readable.pop(replica) == key

  @stateful.rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
  def pass_time(self, seconds):
    self.now_s += seconds

  @stateful.rule(
    keys=st.lists(st.sampled_from(KEYS), max_size=5),
    segment=st.sampled_from('ab'),
  )
  def touch(self, keys, segment):
    self.master.touch(keys, segment)

  @stateful.invariant()
  def agrees(self):
    self.master.check()
    for segment in 'ab':
      assert set(self.master.inventory(segment)) == {
        k for r, k in self.readable.items() if r.segment == segment
      }


TestMasterMachine = MasterMachine.TestCase
TestMasterMachine.settings = hypothesis.settings(
  max_examples=60, stateful_step_count=60, deadline=None
)
