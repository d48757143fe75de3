# SPDX-License-Identifier: Apache-2.0
"""The prefix index against a naive one, whatever it is told and how."""

from collections import Counter
from collections import defaultdict
from dataclasses import replace
import random

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mooncake_jax.conductor.event_order import EventOrder
from mooncake_jax.conductor.matches import Match
from mooncake_jax.conductor.matches import positions
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory

TIERS = ('device', 'host', 'ssd')
# Three conversations that begin alike, as keys of blocks with all before them.
CHAINS = tuple(
  tuple(text[: n + 1].encode() for n in range(len(text)))
  for text in ('abcdefgh', 'abcxyz', 'abuvw')
)
KEYS = sorted({key for chain in CHAINS for key in chain})


class Naive:
  """Sets of keys a segment, and matches by their definition."""

  def __init__(self):
    self.held = defaultdict(set)
    self.expected = Counter()

  def observe(self, event):
    if isinstance(event, InstanceLost):
      self.forget(event.instance)
      return
    held = self.held[event.instance, event.tier]
    match event:
      case BlocksStored():
        held.update(event.keys)
      case BlocksEvicted():
        held.difference_update(event.keys)
      case Inventory():
        self.held[event.instance, event.tier] = set(event.keys)

  def forget(self, instance):
    for name in [name for name in self.held if name[0] == instance]:
      del self.held[name]
    for name in [name for name in self.expected if name[0] == instance]:
      del self.expected[name]

  def match(self, instance, chain):
    device, host, ssd = (self.held[instance, tier] for tier in TIERS)
    near = host | {k for k in chain if self.expected[instance, k]}
    fast = _leading(chain, device)
    near = _leading(chain, near | set(chain[:fast]))
    held = host | ssd | {k for k in chain if self.expected[instance, k]}
    usable = _leading(chain, held | set(chain[:fast]))
    return Match(_leading(chain, host | ssd), usable, usable - near, fast)


def _leading(chain, keys):
  return [*(key in keys for key in chain), False].index(False)


def instances(count):
  return tuple(f'p{i}' for i in range(count))


@st.composite
def events(draw, num_instances=4, max_size=40):
  """Store events, numbered by segment as the store does."""
  told, made = Counter(), []
  for _ in range(draw(st.integers(0, max_size))):
    kind = draw(
      st.sampled_from(
        (BlocksStored, BlocksStored, BlocksStored, BlocksEvicted, Inventory)
      )
    )
    name = draw(st.sampled_from(instances(num_instances)))
    tier = draw(st.sampled_from(TIERS))
    chain = draw(st.sampled_from(CHAINS))
    start = draw(st.integers(0, len(chain)))
    keys = chain[start : draw(st.integers(start, len(chain)))]
    told[name, tier] += 1
    made.append(kind(0.0, name, keys, tier, told[name, tier]))
  return made


def hear(index, told):
  for event in told:
    index.observe(event)
  return index


def check(index, naive, names):
  for name in names:
    for tier in TIERS:
      assert set(index.inventory(name, tier)) == naive.held[name, tier]
  for chain in CHAINS:
    matches = index.match(chain)
    truth = {name: naive.match(name, chain) for name in names}
    assert dict(matches) == {n: m for n, m in truth.items() if m.usable}
    assert all(matches.at(index.position(n)) == truth[n] for n in names)
    check_groups(index, matches, truth)


def check_groups(index, matches, truth):
  grouped = {}
  for usable, slow, fast, mask in matches.groups():
    assert mask
    for position in positions(mask):
      name = index.names[position]
      assert name not in grouped
      grouped[name] = usable, slow, fast
  assert grouped == {
    n: (m.usable, m.slow, m.fast) for n, m in truth.items() if m.usable
  }
  stored = {
    index.names[p]: n for n, mask in matches.sources() for p in positions(mask)
  }
  assert stored == {n: m.stored for n, m in truth.items() if m.stored}
  lengths = [n for n, _ in matches.sources()]
  assert lengths == sorted(set(lengths), reverse=True)


@given(
  events(), st.lists(st.tuples(st.sampled_from('+-!'), st.integers(0, 11)))
)
def test_it_equals_a_naive_index(told, placed):
  names, index, naive = instances(4), PrefixIndex(), Naive()
  for event in told:
    index.observe(event)
    naive.observe(event)
    if placed:
      kind, draw = placed.pop()
      name, chain = names[draw % 4], CHAINS[draw // 4]
      if kind == '!':
        index.observe(InstanceLost(0.0, name))
        naive.forget(name)
      elif kind == '+':
        index.expect(name, chain)
        naive.expected.update((name, key) for key in chain)
      else:
        index.unexpect(name, chain)
        naive.expected -= Counter((name, key) for key in chain)
  check(index, naive, names)


@given(events(), st.randoms(use_true_random=False))
def test_shuffled_and_repeated_events_converge(told, rng):
  naive = Naive()
  for event in told:
    naive.observe(event)
  heard = told + [e for e in told if rng.random() < 0.5]
  rng.shuffle(heard)
  check(hear(PrefixIndex(), heard), naive, instances(4))


@given(events(), st.integers(0, 40), st.randoms(use_true_random=False))
def test_one_restarted_from_inventories_equals_a_live_one(told, at, rng):
  """Whatever of the earlier events it hears again, or the later ones first."""
  live, before = hear(PrefixIndex(), told), told[:at]
  asked, counts = hear(PrefixIndex(), before), Counter()
  for event in before:
    counts[event.instance, event.tier] = event.seq
  heard = told[at:] + [e for e in before if rng.random() < 0.3]
  heard += [
    Inventory(1.0, name, tuple(asked.inventory(name, tier)), tier, seq)
    for (name, tier), seq in counts.items()
  ]
  rng.shuffle(heard)
  restarted = hear(PrefixIndex(), heard)
  for name in instances(4):
    for tier in TIERS:
      found, truth = (set(i.inventory(name, tier)) for i in (restarted, live))
      assert found == truth


@given(events(num_instances=100))
def test_masks_of_many_instances_are_as_good(told):
  names, naive = instances(100), Naive()
  for event in told:
    naive.observe(event)
  check(hear(PrefixIndex(names), told), naive, names)


def test_positions_are_those_that_were_asked_for():
  index = PrefixIndex(('b', 'a'))
  index.add('c', CHAINS[0])
  index.add('a', CHAINS[0])
  assert index.names == ['b', 'a', 'c']
  assert index.match(CHAINS[0]).sources() == [(8, 0b110)]
  assert positions(0b110) == [1, 2] and positions(0) == []
  assert positions(1 << 300 | 1) == [0, 300] and positions(1 << 300) == [300]


def test_a_match_ends_at_a_hole_and_goes_on_when_it_is_filled():
  index, chain = PrefixIndex(), CHAINS[0]
  index.add('a', chain)
  index.add('b', chain[:5])
  index.discard('a', chain[2:3])
  assert index.match(chain) == {'a': Match(2, 2), 'b': Match(5, 5)}
  index.expect('a', chain[2:3])
  assert index.match(chain) == {'a': Match(2, 8), 'b': Match(5, 5)}
  index.add('a', chain[2:3])
  assert index.match(chain) == {'a': Match(8, 8), 'b': Match(5, 5)}


def test_boundaries_are_cumulative():
  index, chain = PrefixIndex(), CHAINS[0]
  index.add('a', (*chain[:2], chain[3], chain[7]), 'device')
  index.add('a', (chain[2], chain[3]), 'host')
  index.add('a', (chain[0], *chain[4:6]), 'ssd')
  # Device 2, host 4, disk 6; what others can read ends before chain[1].
  assert index.match(chain)['a'] == Match(1, 6, slow=2, fast=2)


def test_an_event_that_never_comes_is_given_up_and_an_inventory_repairs():
  told = [BlocksStored(0.0, 'a', CHAINS[0][i : i + 1]) for i in range(8)]
  told = [replace(e, seq=i + 1) for i, e in enumerate(told)]
  order = EventOrder(max_waiting=3)
  heard = [
    e.seq for event in told if event.seq != 2 for e in order.admit(event)
  ]
  assert heard == [1, 3, 4, 5, 6, 7, 8]
  assert (order.seq, order.num_lost) == (8, 1)
  assert not order.admit(told[1])  # too late
  whole = Inventory(1.0, 'a', CHAINS[0], seq=8)
  assert list(order.admit(whole)) == [whole] and order.num_lost == 0


def test_events_told_twice_are_heard_once_and_not_kept():
  order = EventOrder(max_waiting=3)
  told = [BlocksStored(0.0, 'a', (), seq=i) for i in range(1, 9)]
  heard = [e.seq for e in told for twice in (e, e) for e in order.admit(twice)]
  assert heard == [*range(1, 9)] and not order.num_lost


def test_segments_that_lost_events_are_named():
  index = PrefixIndex()
  for seq in range(2, 2000):
    index.observe(BlocksStored(0.0, 'a', CHAINS[0], 'ssd', seq))
  assert index.doubtful() == {('a', 'ssd'): 1}
  index.observe(Inventory(0.0, 'a', CHAINS[0][:2], 'ssd', 1999))
  assert not index.doubtful()
  assert index.match(CHAINS[0])['a'].stored == 2


@given(st.integers(1, 64), st.integers(0, 2**32))
def test_it_stays_within_its_bound_and_keeps_what_is_asked_for(most, seed):
  rng, index = random.Random(seed), PrefixIndex(max_blocks=most)
  hot = _chain('hot', max(most // 4, 1))
  for number in range(40):
    if number % 5 == 0:
      index.match(index_chain := hot)
      index.add('a', index_chain)
    name = rng.choice('ab')
    chain = _chain(str(number), rng.randrange(1, max(most // 8, 2)))
    index.add(name, chain)
    index.match(chain)
    assert index.num_entries <= most
    if most >= 32:
      assert index.match(hot)['a'].stored == len(hot)


def test_what_was_matched_and_is_gone_is_not_kept():
  index = PrefixIndex(max_blocks=40)
  index.add('a', _chain('stays', 32))
  for number in range(50):
    chain = _chain(str(number), 8)
    index.add('a', chain)
    index.match(chain)
    index.discard('a', chain)
  assert index.num_entries == 32 and not index.num_matched


def test_each_request_takes_back_its_own_expectation():
  index, chain = PrefixIndex(), CHAINS[0]
  for num_blocks in (8, 4, 4):
    index.expect('a', chain[:num_blocks])
  for num_blocks, left in ((8, 4), (4, 4), (4, 0)):
    index.unexpect('a', chain[:num_blocks])
    assert index.match(chain).at(0).usable == left
  index.expect('a', chain)
  index.expect('a', chain)
  index.observe(InstanceLost(0.0, 'a'))
  index.expect('a', chain)
  index.unexpect('a', chain)
  assert not index.match(chain)


def test_what_is_expected_is_kept_beyond_the_bound():
  index = PrefixIndex(max_blocks=4)
  index.expect('a', _chain('x', 20))
  index.add('a', _chain('y', 20))
  assert index.match(_chain('x', 20))['a'].usable == 20
  index.unexpect('a', _chain('x', 20))
  index.add('a', _chain('z', 2))
  assert index.num_entries <= 4


def test_equal_sets_of_holders_are_one_and_vanish_when_unused():
  index = PrefixIndex()
  for i in range(50):
    index.add('a', _chain(str(i), 3))
    index.add('b', _chain(str(i), 2))
  assert index.num_sets == 3  # nobody, a, and a with b
  index.forget('b')
  assert index.num_sets == 2 and len(index) == 150


def test_no_room_at_all_is_refused():
  with pytest.raises(ValueError, match='max_blocks'):
    PrefixIndex(max_blocks=0)


def _chain(name, count):
  return tuple(f'{name}.{i}'.encode() for i in range(count))
