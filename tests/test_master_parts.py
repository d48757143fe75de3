# SPDX-License-Identifier: Apache-2.0
"""The Master's chains, tiers, pins, quotas, tasks and segments, by example."""

import pytest

from mooncake_jax.store.master import Master

KEYS = tuple(bytes([i]) for i in range(12))


def make(**kwargs) -> Master:
  """Two hosts of four blocks each, the first over an SSD of eight."""
  settings = {'lease_s': 10.0, 'high_watermark': 1.0, 'eviction_ratio': 0.0}
  master = Master(**{**settings, **kwargs})
  master.mount('a/ssd', 80, 'ssd')
  master.mount('a', 40, lower='a/ssd')
  master.mount('b', 40)
  return master


def put(master, keys, segment='b', now_s=0.0, **kwargs):
  start = master.put_start_chain(
    keys, 0, len(keys), 10, segment, now_s, **kwargs
  )
  assert all(master.put_end_chain(start.replicas))
  return start


def segments(replicas):
  return [replica.segment for replica in replicas]


def test_a_chain_is_put_and_read_in_one_call_each():
  master = make()
  put(master, KEYS[:2])
  start = master.put_start_chain(KEYS, 0, 6, 10, 'b', 0.0)
  assert start.indices == (2, 3) and start.stop == 4
  assert start.refusal == 'room'
  assert master.get_chain(KEYS, 0.0) == tuple(
    replica for key in KEYS[:2] for replica in master.peek(key)
  )
  assert master.put_end_chain(start.replicas) == (True, True)
  assert len(master.get_chain(KEYS, 0.0)) == 4


def test_readers_take_the_fastest_medium_then_the_nearest():
  master = make()
  put(master, KEYS[:1], 'b')
  put(master, KEYS[:1], 'a/ssd')
  assert segments(master.get_chain(KEYS[:1], 0.0, 'a')) == ['b']
  near = master.get_chain(KEYS[:1], 0.0, 'a', max_remote_blocks=0)
  assert segments(near) == ['a/ssd']
  put(master, KEYS[:1], 'a')
  assert segments(master.get_chain(KEYS[:1], 0.0, 'a')) == ['a']


def test_equally_near_replicas_are_read_in_turn():
  master = make()
  put(master, KEYS[:1], 'a')
  put(master, KEYS[:1], 'b')
  read = [master.get_chain(KEYS[:1], 0.0)[0].segment for _ in range(10)]
  assert read.count('a') == read.count('b') == 5


def test_a_block_is_readable_all_the_way_down_to_the_ssd():
  master = make()
  put(master, KEYS[:4], 'a')
  refused = master.put_start(KEYS[4], 10, 'a', 0.0)
  assert refused.replica is None and refused.refusal == 'offload'
  master.eviction_ratio = 0.25
  (task,) = master.victims('a', 0.0).tasks
  assert task.src.key == KEYS[3]  # the tail
  assert segments(master.peek(KEYS[3])) == ['a']
  assert master.put_start(KEYS[4], 10, 'a', 0.0).replica is None
  assert master.copy_end(task, 0.0).published
  assert segments(master.peek(KEYS[3])) == ['a', 'a/ssd']
  start = master.put_start(KEYS[4], 10, 'a', 0.0)
  assert [e.replica for e in start.evicted] == [task.src]
  assert segments(master.peek(KEYS[3])) == ['a/ssd']


def test_a_failed_offload_lets_the_block_go():
  master = make(eviction_ratio=0.25)
  put(master, KEYS[:4], 'a')
  (task,) = master.victims('a', 0.0).tasks
  master.copy_revoke(task)
  start = master.put_start(KEYS[4], 10, 'a', 0.0)
  assert [e.key for e in start.evicted] == [KEYS[3]]
  assert not master.exists(KEYS[3])
  assert master.statistics().counts.condemned == 1


def test_soft_pins_go_last_and_only_while_they_hold_hard_pins_never():
  master = make()
  put(master, KEYS[:1], pin='hard')
  put(master, KEYS[1:3], pin='soft', soft_pin_ttl_s=5.0)
  put(master, KEYS[3:4])
  first = put(master, KEYS[4:5], now_s=1.0)
  assert [e.key for e in first.evicted] == [KEYS[3]]
  rest = put(master, KEYS[5:8], now_s=1.0)
  assert {e.key for e in rest.evicted} == {KEYS[1], KEYS[2], KEYS[4]}
  assert master.exists(KEYS[0])
  assert put(master, KEYS[8:], now_s=9.0).refusal == 'room'


def test_a_tenant_over_its_quota_evicts_its_own_and_gets_refunds():
  master = make()
  master.set_quota('x', 20)
  put(master, KEYS[:2], tenant='x')
  put(master, KEYS[2:3], tenant='y')
  start = put(master, KEYS[3:4], tenant='x')
  assert [e.key for e in start.evicted] == [KEYS[1]]
  master.get_replicas(KEYS[0], 0.0)
  master.get_replicas(KEYS[3], 0.0)
  refused = master.put_start(KEYS[4], 10, 'b', 0.0, tenant='x')
  assert refused.refusal == 'quota'
  master.remove(KEYS[0], 99.0)
  start = master.put_start(KEYS[4], 10, 'b', 0.0, tenant='x')
  assert start.replica is not None
  master.put_revoke(KEYS[4], start.replica)
  assert master.statistics().tenant_bytes == {'x': 10, 'y': 10}


def test_a_dead_put_is_reclaimed_and_its_end_comes_too_late():
  master = make(put_timeout_s=5.0)
  dead = master.put_start(KEYS[0], 10, 'b', 0.0).replica
  assert dead is not None
  assert master.put_start(KEYS[0], 10, 'b', 5.0).stored
  again = master.put_start(KEYS[0], 10, 'b', 5.1)
  assert again.replica is not None and again.evicted[0].replica == dead
  assert not master.put_end(KEYS[0], dead)
  assert [e.replica for e in master.reap(11.0)] == [again.replica]


def test_a_move_leaves_its_source_to_readers_until_their_lease_ends():
  master = make()
  (old,) = put(master, KEYS[:1]).replicas
  task = master.copy_start(KEYS[0], 'b', 'a', 0.0, move=True).task
  assert task is not None
  assert master.remove(KEYS[0], 0.0) is None
  master.get_chain(KEYS[:1], 1.0)
  assert master.copy_end(task, 2.0).evicted == ()
  assert master.peek(KEYS[0]) == (task.dst,)
  assert master.is_valid(old)
  assert master.reap(11.0) == ()
  assert [e.replica for e in master.reap(11.1)] == [old]


def test_a_segment_that_leaves_waits_for_its_readers_and_takes_no_put():
  master = make()
  put(master, KEYS[:2])
  master.get_chain(KEYS[:1], 0.0)
  gone = master.unmount('b', 1.0)
  assert set(gone.lost) == set(KEYS[:2]) and gone.waiting == 1
  assert [e.key for e in gone.evicted] == [KEYS[1]]
  assert master.put_start(KEYS[3], 10, 'b', 1.0).refusal == 'draining'
  assert not master.exists(KEYS[0])
  assert [e.key for e in master.reap(10.1)] == [KEYS[0]]
  assert 'b' not in master.segments()
  master.mount('b', 40)


def test_what_lost_a_replica_is_listed_hottest_first_until_repaired():
  master = make()
  for name in ('a', 'b'):
    put(master, KEYS[:3], name)
  for count, key in enumerate(KEYS[:3]):
    for _ in range(count):
      master.get_chain((key,), 0.0)
  gone = master.lose('b')
  assert set(gone.kept) == set(KEYS[:3]) and gone.lost == ()
  assert [w.key for w in master.under_replicated(1.0)] == [KEYS[2], KEYS[1]]
  assert master.under_replicated(600.0) == ()
  master.mount('c', 40)
  target = master.choose_segment(KEYS[2], 10, 1.0)
  assert target == 'c'
  task = master.copy_start(KEYS[2], 'a', target, 1.0).task
  assert task is not None and master.copy_end(task, 1.0).published
  assert [w.key for w in master.under_replicated(1.0)] == [KEYS[1]]


def test_a_lost_source_takes_its_half_made_copies_with_it():
  master = make()
  put(master, KEYS[:1])
  task = master.copy_start(KEYS[0], 'b', 'a', 0.0).task
  assert task is not None
  gone = master.lose('b')
  assert [e.replica for e in gone.evicted] == [task.dst]
  assert gone.lost == KEYS[:1]
  assert not master.copy_end(task, 0.0).published
  master.check()


def test_removal_by_pattern_tells_what_it_was_refused():
  master = make()
  put(master, KEYS[:4])
  master.get_replicas(KEYS[1], 0.0)
  removed = master.remove_regex('^0[12]$', 0.0)
  assert [e.key for e in removed.evicted] == [KEYS[2]]
  assert removed.refused == (KEYS[1],)
  assert len(master.remove_prefix('0', 99.0).evicted) == 3
  with pytest.raises(ValueError, match='pattern'):
    master.remove_regex('(', 0.0)
  with pytest.raises(ValueError, match='hex_prefix'):
    master.remove_prefix('XY', 0.0)


def test_adopted_blocks_are_readable_charged_to_nobody_and_evict_nothing():
  master = make()
  adopted = [master.adopt(key, 10, 'a/ssd') for key in KEYS]
  assert adopted[8:] == [None] * 4
  assert master.adopt(KEYS[0], 10, 'a/ssd') == adopted[0]
  assert segments(master.get_chain(KEYS, 0.0, 'a')) == ['a/ssd'] * 8
  assert adopted[0] is not None and master.uses(adopted[0]) == 1
  found = master.statistics()
  assert found.tenant_bytes == {} and found.counts.hits == {'ssd': 8}


def test_nothing_is_evicted_for_a_put_that_finds_no_room_anyway():
  master = make()
  put(master, KEYS[:4])
  master.get_chain(KEYS[:2], 0.0)
  assert master.put_start(KEYS[5], 30, 'b', 0.0).evicted == ()
  assert all(master.exists(key) for key in KEYS[:4])


def test_soft_pinned_blocks_are_offloaded_last():
  master = make(eviction_ratio=0.25)
  put(master, KEYS[:2], 'a')
  put(master, KEYS[2:4], 'a', pin='soft', soft_pin_ttl_s=5.0)
  put(master, KEYS[:2], 'a')  # used again: the pinned ones are older now
  (task,) = master.victims('a', 1.0).tasks
  assert task.src.key == KEYS[1]
