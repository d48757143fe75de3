# SPDX-License-Identifier: Apache-2.0
"""Transfers in legs: nothing is lost, made up or told twice."""

from collections import Counter
import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine_pieces import LAYOUT
from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.blocks.segments import WIRE
from mooncake_jax.distributed.commands import Cancel
from mooncake_jax.distributed.legs import by_instance
from mooncake_jax.distributed.legs import legs_of
from mooncake_jax.distributed.legs import sent_as
from mooncake_jax.distributed.work import Following
from mooncake_jax.distributed.work import Work

NAMES = st.sampled_from(['p0', 'p1', 'd0'])
SIZES = (1, 2, 8)


@st.composite
def ops(draw) -> TransferOp:
  count = draw(st.integers(1, 20))
  pages = tuple(range(1, count + 1))

  def side(replica_id: int, may_be_shared=False):
    name = draw(NAMES)
    if may_be_shared and draw(st.booleans()):
      return Replica(REMOTE, replica_id, b'k')
    if draw(st.booleans()):
      return DevicePages(name, pages)
    return Replica(name + draw(st.sampled_from(['', '/ssd'])), replica_id, b'k')

  src, dst = side(1), side(2, may_be_shared=True)
  if draw(st.booleans()):
    src, dst = dst, src
  return TransferOp(src, dst, 0, 2, 64 * count)


@given(st.lists(ops(), max_size=8))
def test_every_byte_leaves_once_and_arrives_once(transfer):
  legs = legs_of(transfer, itertools.count(), SIZES)
  sent, came, moved = Counter(), Counter(), Counter()
  for name, leg in legs.items():
    assert leg.ops and leg.of is not None
    for op, index in zip(leg.ops, leg.of, strict=True):
      if (number := sent_as(op)) is not None:
        sent[number] += op.num_bytes
      elif isinstance(op.src, Replica) and op.src.segment == ARRIVALS:
        assert op.src.replica_id in leg.numbers
        came[op.src.replica_id] += op.num_bytes
        moved[index] += op.num_bytes
      else:
        assert op == transfer[index]
        moved[index] += op.num_bytes
      for side in (op.src, op.dst):  # no instance is told of another's memory
        if isinstance(side, DevicePages):
          assert side.instance == name
        elif side.segment != REMOTE:  # which is everybody's
          assert side.segment.endswith((WIRE, ARRIVALS)) or (
            side.segment.partition('/')[0] == name
          )
  assert sent == came
  assert moved == Counter({i: op.num_bytes for i, op in enumerate(transfer)})


@given(st.lists(ops(), min_size=1, max_size=6), st.data())
def test_an_op_has_completed_when_all_its_pieces_have(transfer, data):
  legs = legs_of(transfer, itertools.count(), SIZES)
  work = Work(0, {name: Cancel(0) for name in legs}, legs, len(transfer))
  expected = ['completed'] * len(transfer)
  for name, leg in legs.items():
    statuses = tuple(
      data.draw(st.sampled_from(['completed', 'completed', 'failed']))
      for _ in leg.ops
    )
    bad, missed = 'failed' in statuses, set()
    for op, index, status in zip(leg.ops, leg.of or (), statuses):
      if status == 'failed':
        expected[index] = 'failed'
        missed |= {sent_as(op)} - {None}
    end = Completion(
      0, 'failed' if bad else 'completed', 1.0, 2.0, op_status=statuses
    )
    assert {*work.end(name, end)} == missed
  whole = work.completion()
  assert list(whole.op_status) == expected
  assert whole.status == ('failed' if 'failed' in expected else 'completed')


def test_a_work_is_at_home_where_it_ends():
  def home(*transfer):
    legs = legs_of(transfer, itertools.count(), SIZES)
    return Work(0, dict.fromkeys(legs, Cancel(0)), legs, len(transfer)).home

  def op(src, dst):
    return TransferOp(src, dst, 0, 2, 64)

  p0, p1, d0 = (DevicePages(name, (1,)) for name in ('p0', 'p1', 'd0'))
  assert home(op(p0, d0)) == 'd0'
  assert home(op(Replica('p1', 1, b''), p0), op(Replica('p0', 2, b''), p0)) == (
    'p0'
  )
  assert home(op(p0, Replica('p0', 3, b''))) == 'p0'
  assert home(op(p0, d0), op(d0, p1)) is None
  shared = Replica(REMOTE, 4, b'')
  assert home(op(shared, p0), op(Replica('p0', 2, b''), p0)) == 'p0'
  assert home(op(Replica('p0/ssd', 2, b''), shared)) == 'p0'


def test_blocks_of_the_shared_store_are_read_and_put_in_one_value():
  replicas = [Replica(REMOTE, 1, b'k'), Replica('p0/ssd', 2, b'l')]
  pages, layout = DevicePages('p0', (1, 2, 3, 4)), LAYOUT
  for some in (replicas, replicas[:1]):
    ops = BlockOps(layout, pages, some, range(len(some)), are_puts=False)
    assert legs_of(ops, itertools.count(), SIZES)['p0'].ops is ops
  far = [replicas[0], Replica('p1', 3, b'm')]
  ops = BlockOps(layout, pages, far, (0, 1), are_puts=False)
  legs = legs_of(ops, itertools.count(), SIZES)
  num_parts = len(layout.layer_ranges)
  assert [len(legs[n].ops) for n in ('p0', 'p1')] == [2 * num_parts, num_parts]


def test_who_may_have_put_or_read_a_block_is_told_to_forget_it():
  shared, own = Replica(REMOTE, 1, b'k'), Replica('p1/ssd', 2, b'l')
  told = by_instance([shared, own], ('p0', 'p1'))
  assert told == {'p0': [shared], 'p1': [shared, own]}


def test_a_chunk_is_not_told_of_before_the_fetch_that_it_follows():
  """Its instance knew that all had come; the sender has yet to say so."""
  op = TransferOp(Replica('p1', 1, b''), DevicePages('p0', (1,)), 0, 2, 64)
  legs = legs_of([op], itertools.count(), SIZES)
  fetch = Work(0, dict.fromkeys(legs, Cancel(0)), legs, 1, is_started=True)
  chunk = Work(1, {'p0': Cancel(1)})
  following = Following()
  following.note(chunk, fetch)
  assert not chunk.waits  # it is started at once, where the bytes come
  chunk.is_started = True
  fetch.end('p0', Completion(0, 'completed', 1.0, 2.0))
  chunk.end('p0', Completion(1, 'completed', 2.0, 3.0))
  assert not chunk.left and not chunk.is_over and not fetch.is_over
  fetch.end('p1', Completion(0, 'completed', 1.0, 2.0))
  assert fetch.is_over
  assert following.ended(0) == [chunk] and chunk.is_over
