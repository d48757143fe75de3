# SPDX-License-Identifier: Apache-2.0
"""Which copy goes first, by policy."""

import pytest

from mooncake_jax.store.eviction import POLICIES
from mooncake_jax.store.master import Master

OLD = tuple(b'old%d' % i for i in range(4))
NEW = tuple(b'new%d' % i for i in range(4))


def make(name: str) -> Master:
  policy = POLICIES[name](8)
  master = Master(1.0, high_watermark=1.0, eviction_ratio=0.0, policy=policy)
  master.mount('a', 8)
  for chain in (OLD, NEW):
    start = master.put_start_chain(chain, 0, 4, 1, 'a', 0.0)
    master.put_end_chain(start.replicas)
  return master


def victims(master: Master, count: int) -> list[bytes]:
  start = master.put_start_chain(
    tuple(b'x%d' % i for i in range(count)), 0, count, 1, 'a', 99.0
  )
  return [evicted.key for evicted in start.evicted]


@pytest.mark.parametrize('name', POLICIES)
def test_tails_go_before_heads(name):
  master = make(name)
  order = victims(master, 8)
  for chain in (OLD, NEW):
    assert [key for key in order if key in chain] == list(reversed(chain))


@pytest.mark.parametrize('name', POLICIES)
def test_what_was_read_outlives_its_like(name):
  master = make(name)
  master.get_chain(OLD, 1.0, 'a')
  assert set(victims(master, 4)) == set(NEW)


def test_lfu_keeps_the_often_read_where_lru_keeps_the_late():
  for name, gone in (('lru', OLD), ('lfu', NEW)):
    master = make(name)
    master.get_chain(OLD, 1.0, 'a')
    master.touch(NEW, 'a')
    assert set(victims(master, 4)) == set(gone)


def test_length_aware_takes_the_ends_of_all_requests_first():
  assert victims(make('length_aware'), 2) == [OLD[3], NEW[3]]


def test_aged_forgets_what_was_read_long_ago():
  master = make('aged')
  master.get_chain(OLD, 1.0, 'a')
  for _ in range(4):
    master.touch(NEW, 'a')
  assert set(victims(master, 4)) == set(OLD)
