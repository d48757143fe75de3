# SPDX-License-Identifier: Apache-2.0
"""Parts between processes' ends: what is sent arrives whole, or not at all."""

import socket
import threading
import time

import numpy as np
import pytest

from mooncake_jax.backend import Replica
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.landing import MAX_STRANGERS
from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.arrivals import EARLY_S
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.segment import Part
from wire_pieces import ends
from wire_pieces import Got
from wire_pieces import part
from wire_pieces import send
from wire_pieces import SHAPE


@pytest.fixture(scope='module', params=['tcp', 'nixl', 'jax'])
def movers(request):
  """A mover at either end."""
  if request.param == 'nixl':
    pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  two = [
    make_mover(request.param, f'{end}-{time.time()}', 'lo') for end in 'ab'
  ]
  yield two
  for mover in two:
    mover.close()


@pytest.mark.parametrize('checksums', [False, True])
def test_what_is_sent_arrives_whole_before_and_after_it_is_expected(
  movers, checksums
):
  with ends(movers, checksums=checksums) as (wire, arrivals, _):
    wire.greet(SHAPE.part())
    sent = [part(seed=1), part((2, 4), 5, (1, 1), seed=2), part(seed=3)]
    send(wire, 7, sent[0])  # early
    got = Got(arrivals, 7)
    send(wire, 7, sent[1])
    send(wire, 8, sent[2])
    other = Got(arrivals, 8)
    for mine, theirs in zip(sent, [*got.parts, *other.parts], strict=True):
      assert mine[:2] == theirs[:2]
      for a, b in zip(mine.slices, theirs.slices, strict=True):
        np.testing.assert_array_equal(a, b)
    assert arrivals.taken_bytes == sum(p.num_bytes for p in sent)
    for left in (*got.lefts, *other.lefts):
      left()
    assert arrivals.taken_bytes == 0


def test_a_part_that_is_larger_than_all_before_arrives(movers):
  with ends(movers) as (wire, arrivals, _):
    got = Got(arrivals, 1)
    for seed, tokens in enumerate((1, 64, 2)):
      send(wire, 1, part((0, 4), tokens, seed=seed))
      np.testing.assert_array_equal(
        got.parts[-1].slices[0], part((0, 4), tokens, seed=seed).slices[0]
      )
      got.lefts[-1]()


def test_what_nobody_wants_is_refused_and_the_wire_goes_on(movers):
  with ends(movers) as (wire, arrivals, _):
    arrivals.forget(3)
    with pytest.raises(OSError, match='nobody waits'):
      send(wire, 3, part())
    got = Got(arrivals, 4)
    send(wire, 4, part())
    assert len(got.parts) == 1
    arrivals.fail(4, ConnectionError('its source was lost'))
    assert len(got.errors) == 1
    with pytest.raises(OSError):
      send(wire, 4, part())
    assert arrivals.taken_bytes == part().num_bytes  # that of the one taken
    late = Got(arrivals, 4)
    assert len(late.errors) == 1 and not late.parts


def test_what_nobody_comes_for_is_let_go():
  """Of ops that ended before the last `MAX_OVER` that ended badly."""
  now_s = [0.0]
  arrivals = Arrivals(1 << 20, lambda: now_s[0])
  one = part()
  assert arrivals.room(2 * one.num_bytes, 0.0)
  arrivals.landed(1, one)
  now_s[0] = 1.01 * EARLY_S
  assert arrivals.taken_bytes == 2 * one.num_bytes
  arrivals.landed(2, one)
  assert arrivals.taken_bytes == one.num_bytes
  assert len(Got(arrivals, 1).errors) == 1
  assert len(Got(arrivals, 2).parts) == 1
  arrivals.complete(2)  # nothing is remembered of what came whole
  assert arrivals.wants(2)


@pytest.mark.parametrize(
  'bad',
  [
    part(dtype='float16'),
    part(heads=(1,)),
    part(tokens=65),
    Part(3, 5, part().slices),
    Part(0, 1, part().slices),
  ],
)
def test_what_is_no_part_of_this_kvcache_ends_the_connection(movers, bad):
  with ends(movers) as (wire, arrivals, _):
    with pytest.raises(OSError):
      send(wire, 1, bad)
    assert arrivals.taken_bytes == 0
    got = Got(arrivals, 1)
    send(wire, 1, part())  # over a new one
    assert len(got.parts) == 1


def test_bytes_that_changed_on_the_way_are_refused(movers):
  with ends(movers) as (wire, arrivals, _):
    with pytest.raises(OSError, match='checksum'):
      send(wire, 1, part()._replace(total=12345))
    assert arrivals.taken_bytes == 0


def test_parts_of_one_message_are_each_taken_or_refused(movers):
  with ends(movers, limit=3 * part().num_bytes, checksums=True) as (
    wire,
    arrivals,
    _,
  ):
    arrivals.forget(2)
    got = {number: Got(arrivals, number) for number in (1, 3, 4)}
    sent = {number: part(seed=number) for number in range(1, 5)}
    sent[3] = sent[3]._replace(total=12345)
    items = [(Replica(wire.name, n, b''), p) for n, p in sent.items()]
    errors = wire.store_all(items)
    assert [error is None for error in errors] == [True, False, False, True]
    assert 'nobody waits' in str(errors[1]) and 'checksum' in str(errors[2])
    for number in (1, 4):
      (arrived,) = got[number].parts
      np.testing.assert_array_equal(arrived.slices[0], sent[number].slices[0])
      got[number].lefts[0]()
    assert not got[3].parts and arrivals.taken_bytes == 0


def test_parts_of_one_message_that_exceed_the_room_come_one_by_one(movers):
  size = part().num_bytes
  with ends(movers, limit=2 * size) as (wire, arrivals, _):
    got, taken = [], []

    def arrived(it, left):
      got.append(it)
      taken.append(arrivals.taken_bytes)
      left()

    arrivals.expect(1, arrived, got.append)
    sent = [part(seed=seed) for seed in range(7)]
    replica = Replica(wire.name, 1, b'')
    assert wire.store_all([(replica, each) for each in sent]) == [None] * 7
    for mine, theirs in zip(sent, got, strict=True):
      np.testing.assert_array_equal(mine.slices[0], theirs.slices[0])
    assert max(taken) <= 2 * size and arrivals.taken_bytes == 0


def test_a_message_may_take_longer_than_the_limit_while_it_goes_on(movers):
  """Its parts wait for room one after another, none for long."""
  size, stall_s = part().num_bytes, 0.6
  with ends(movers, limit=size, stall_s=stall_s) as (wire, arrivals, _):
    timers = []

    def arrived(_, left):
      timers.append(threading.Timer(0.25, left))
      timers[-1].start()

    arrivals.expect(1, arrived, lambda error: None)
    replica, begun_s = Replica(wire.name, 1, b''), time.monotonic()
    sent = [(replica, part(seed=seed)) for seed in range(5)]
    assert wire.store_all(sent) == [None] * 5
    assert time.monotonic() - begun_s > stall_s
    for timer in timers:
      timer.join()
    assert arrivals.taken_bytes == 0


def test_messages_are_as_long_as_the_line_is_quick(movers, monkeypatch):
  """And as short as they may be after one that did not arrive."""
  size, place = part().num_bytes, 'mooncake_jax.distributed.wire'
  monkeypatch.setattr(f'{place}.MESSAGE_BYTES', (size, 4 * size))
  with ends(movers, limit=64 * size) as (wire, _, _):
    item = Replica(wire.name, 1, b''), part()
    found = []
    for limit_s, count in [(9.0, 1), (9.0, 1), (9.0, 1), (9.0, 4), (0.0, 1)]:
      monkeypatch.setattr(f'{place}.MESSAGE_S', limit_s)
      assert wire.store_all([item] * count) == [None] * count
      found.append(wire.batch_bytes // size)
    assert found == [2, 2, 2, 4, 2]
    wire.lead_to(None)
    assert wire.store_all([item]) != [None]
    assert wire.batch_bytes == size


def test_who_does_not_know_the_secret_is_turned_away(movers):
  with ends(movers, secret='another') as (wire, arrivals, _):
    with pytest.raises(OSError, match='secret'):
      send(wire, 1, part())
    assert arrivals.taken_bytes == 0


def test_a_wire_that_leads_nowhere_fails_at_once(movers):
  with ends(movers) as (wire, _, landing):
    landing.close()
    with pytest.raises(OSError):
      send(wire, 1, part())
    wire.lead_to(None)
    with pytest.raises(OSError, match='not there'):
      send(wire, 1, part())
    landing.__init__(
      WireSpec(movers[0].name), SHAPE, movers[1], Arrivals(1 << 20), 's'
    )


def test_a_new_process_refuses_what_was_for_the_one_before(movers):
  """Kept for an op that never comes it would take room for ever."""
  with ends(movers) as (wire, arrivals, _):
    send(wire, 3, part())  # sooner than the process was told
    arrivals.begin_at(9)
    assert arrivals.taken_bytes == 0
    with pytest.raises(OSError, match='nobody waits'):
      send(wire, 8, part())
    send(wire, 9, part())
    got = Got(arrivals, 9)
    assert len(got.parts) == 1


def test_a_wire_that_was_led_elsewhere_opens_anew(movers):
  """Nothing was under way, so nothing fails."""
  with ends(movers) as (wire, arrivals, landing):
    got = Got(arrivals, 1)
    send(wire, 1, part(seed=0))
    wire.lead_to(landing.address)
    send(wire, 1, part(seed=1))
    wire.lead_to(None)
    with pytest.raises(OSError, match='b is not there'):
      send(wire, 1, part())
    wire.lead_to(landing.address)
    send(wire, 1, part(seed=2))
    assert len(got.parts) == 3


def test_a_receiver_that_stalls_is_given_up_within_the_limit(movers):
  """Room for nothing: the part waits there for what never leaves."""
  size = part().num_bytes
  with ends(movers, limit=size) as (wire, arrivals, landing):
    send(wire, 1, part())
    begun_s = time.monotonic()
    with pytest.raises(OSError):
      send(wire, 2, part())
    assert 1.5 < time.monotonic() - begun_s < 6.0
    assert arrivals.taken_bytes == size
    while landing.num_connections:  # nor does the other end wait for ever
      assert time.monotonic() - begun_s < 8.0
      time.sleep(0.01)


def test_garbage_on_the_port_harms_nobody(movers):
  with ends(movers) as (wire, arrivals, landing):
    for text in (b'GET / HTTP/1.1\r\n\r\n', b'\xff' * 64, b'\x02\0\0\0[]'):
      channel = Channel.to(landing.address, 1.0)
      channel._sock.sendall(text)
      channel.close()
    got = Got(arrivals, 1)
    send(wire, 1, part())
    assert len(got.parts) == 1


def test_who_connects_and_says_nothing_takes_few_threads(movers):
  with ends(movers) as (wire, arrivals, landing):
    got = Got(arrivals, 1)
    send(wire, 1, part())
    silent = [
      socket.create_connection(landing.address, 30.0)
      for _ in range(MAX_STRANGERS + 20)
    ]
    for each in silent[:20]:  # the first ones are turned away
      assert each.recv(1) == b''
    assert landing.num_connections <= 1 + MAX_STRANGERS
    send(wire, 1, part())
    other = Wire('b', WireSpec(movers[0].name), movers[0], 's')
    other.lead_to(landing.address)
    send(other, 1, part())
    assert len(got.parts) == 3
    for each in (*silent, other):
      each.close()


def test_many_senders_at_once(movers):
  with ends(movers) as (_, arrivals, landing):
    wires = [Wire('b', WireSpec(movers[0].name), movers[0], 's') for _ in '123']
    got = [Got(arrivals, number) for number in range(3)]

    def work(number: int) -> None:
      wires[number].lead_to(landing.address)
      for seed in range(10):
        send(wires[number], number, part(seed=100 * number + seed))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(30)
    for number, each in enumerate(got):
      assert len(each.parts) == 10
      for seed, arrived in enumerate(each.parts):
        expected = part(seed=100 * number + seed)
        np.testing.assert_array_equal(arrived.slices[0], expected.slices[0])
    for wire in wires:
      wire.close()


def test_what_waits_for_a_wire_goes_together(movers):
  """In its own order; what was called off or is refused harms no other."""
  with ends(movers) as (wire, arrivals, _):
    arrivals.forget(3)
    got, ended, refused = Got(arrivals, 1), [], []
    tier = FarTier(wire, lambda name, error: None, 1 << 20)
    begin, done = threading.Event(), threading.Semaphore(0)
    sizes, store_all = [], wire.store_all

    def wait():
      begin.wait(9)

    def counted(items):
      sizes.append(len(items))
      return store_all(items)

    tier.write_link._store_all = counted
    first = Job(0, lambda: True, wait, ended.append)
    tier.write_link.submit(first, 0)
    for seed in range(10):
      number = 3 if seed == 7 else 1
      job = Job(
        part().num_bytes,
        lambda seed=seed: seed != 4,
        lambda seed=seed: ended.append(seed),
        refused.append,
        done.release,
        (Replica(wire.name, number, b''), part(seed=seed)),
      )
      tier.write_link.submit(job, 0)
    begin.set()
    for _ in range(10):
      assert done.acquire(timeout=9)
    tier.close()
    assert sizes == [9] and len(refused) == 1
    assert ended == [0, 1, 2, 3, 5, 6, 8, 9]
    for seed, arrived in zip(ended, got.parts, strict=True):
      np.testing.assert_array_equal(
        arrived.slices[0], part(seed=seed).slices[0]
      )
    assert tier.write_link.count.num_bytes == 8 * part().num_bytes
