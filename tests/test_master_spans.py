# SPDX-License-Identifier: Apache-2.0
"""Spans are a matter of speed alone: parted into blocks, they answer alike."""

from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st
import pytest

from mooncake_jax.request import BlockKey
from mooncake_jax.store.eviction import POLICIES
from mooncake_jax.store.master import Master

Chain = tuple[BlockKey, ...]
Call = Callable[[Master], Any]

# Prompts of a common beginning that part at some block.
TRUNK = tuple(b'trunk%d' % i for i in range(8))
places = st.sampled_from('ab')


@st.composite
def chains(draw) -> Chain:
  trunk = TRUNK[: draw(st.integers(0, 8))]
  name = draw(st.sampled_from([b'x', b'y']))
  return trunk + tuple(name + b'%d' % i for i in range(draw(st.integers(1, 6))))


@st.composite
def puts(draw) -> Call:
  chain, place = draw(chains()), draw(places)
  first = draw(st.integers(0, len(chain)))
  pin = draw(st.sampled_from(['none', 'none', 'none', 'soft', 'hard']))
  written = draw(st.sets(st.integers(0, 13), max_size=3))
  stop = draw(st.integers(first, len(chain)))

  def call(master: Master) -> Any:
    now_s = clock(master)
    start = master.put_start_chain(
      chain, first, stop, 1, place, now_s, pin=pin, soft_pin_ttl_s=9.0
    )
    ready = [r for i, r in enumerate(start.replicas) if i not in written]
    ended = master.put_end_chain(ready)
    return start, ended, master.victims('a', now_s)

  return call


@st.composite
def others(draw) -> Call:
  chain, place = draw(chains()), draw(places)
  budget = draw(st.sampled_from([None, 0, 1, 4]))
  key = draw(st.sampled_from(chain))

  def get(master: Master) -> Any:
    found = master.get_chain(
      chain, clock(master), place, max_remote_blocks=budget
    )
    return found, master.num_valid(found)

  calls: dict[str, Call] = {
    'get': get,
    'touch': lambda master: master.touch(chain, place),
    'lease': lambda master: master.lease(chain, clock(master)),
    'num_at': lambda master: master.num_at(place, chain),
    'get one': lambda master: master.get_replicas(key, clock(master)),
    'remove': lambda master: master.remove(key, clock(master)),
    'copy': lambda master: master.copy_start(key, 'b', 'a', clock(master)),
    'move': lambda master: master.copy_start(
      key, 'a', 'b', clock(master), True
    ),
    'drop': lambda master: master.drop(key, place, clock(master)),
    'unpin': lambda master: master.pin(chain, 'none', clock(master)),
    'reap': lambda master: sorted(master.reap(clock(master))),
    'pass': lambda master: master.put_start(b'tick', 1, 'clock', clock(master)),
  }
  return calls[draw(st.sampled_from([*calls]))]


def clock(master: Master) -> float:
  """Time goes with the Master's calls, so that two of them agree on it."""
  return float(master.statistics().counts.calls.total())


def make(policy: str) -> Master:
  master = Master(
    6.0,
    high_watermark=0.9,
    eviction_ratio=0.2,
    policy=POLICIES[policy](16),
    put_timeout_s=20.0,
  )
  master.mount('a/ssd', 12, 'ssd')
  master.mount('a', 16, lower='a/ssd')
  master.mount('b', 12)
  master.mount('clock', 1)
  return master


@pytest.mark.parametrize('policy', sorted(POLICIES))
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(calls=st.lists(puts() | others(), max_size=40))
def test_a_master_whose_spans_are_parted_answers_the_same(policy, calls):
  whole, parted = make(policy), make(policy)
  for call in calls:
    assert call(whole) == call(parted)
    for key in [*parted._spans]:
      parted._alone(key)
    for name in whole.segments():
      assert whole.inventory(name) == parted.inventory(name)
  whole.check()
  parted.check()
  assert whole.statistics() == parted.statistics()


def test_what_an_offload_passed_over_may_be_parted_to_make_room_below():
  master = Master(10.0, 1.0, 0.5, POLICIES['length_aware'](4))
  master.mount('a/ssd', 6, 'ssd')
  master.mount('a', 4, lower='a/ssd')
  leased, other, last = TRUNK[:3], TRUNK[3:6], TRUNK[7:]
  for chain, place in (
    (leased, 'a/ssd'),
    (other, 'a/ssd'),
    (leased, 'a'),
    (last, 'a'),
  ):
    start = master.put_start_chain(chain, 0, len(chain), 1, place, 0.0)
    assert all(master.put_end_chain(start.replicas))
  master.lease(leased, 0.0)
  found = master.victims('a', 0.0)
  assert [task.src.key for task in found.tasks] == [*last]
  assert {r.key for r in master.replicas('a')} == {*leased, *last}
  master.check()
