# SPDX-License-Identifier: Apache-2.0
"""NIXL's own: what other agents' memory is known, read, and given up."""

import socket
import threading
import time

import numpy as np
import pytest

from mooncake_jax.backend import Replica
from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.nixl import NixlMover
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from wire_pieces import ends
from wire_pieces import Got
from wire_pieces import part
from wire_pieces import send


def test_what_a_read_left_behind_goes_with_the_next_that_ends():
  """Its memory stays as long as the read may write there, and no longer."""
  pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  here, there = [NixlMover(f'{e}-{time.time()}', 'lo') for e in 'rs']
  server = socket.create_server(('127.0.0.1', 0))
  channel = Channel.to(server.getsockname(), 2.0)
  inlet, outlet = here.inlet(), there.outlet()
  sent, into = [np.arange(9.0)], [np.zeros(9)]
  with outlet.offer(sent, 1.0) as offer:
    with pytest.raises(OSError, match='could not read'):  # nobody helps
      inlet.fetch(offer.note, 0, into, channel, 0.1)
    (reader,) = here.readers
    assert len(reader.abandoned) == 1
    done = threading.Event()

    def help_on():
      while not done.wait(1e-4):
        there.offering.progress()

    helper = threading.Thread(target=help_on)
    helper.start()
    try:
      for _ in range(2):
        inlet.fetch(offer.note, 0, into, channel, 10.0)
    finally:
      done.set()
      helper.join()
  np.testing.assert_array_equal(into[0], sent[0])
  assert not reader.abandoned
  for each in (inlet, outlet, channel, server, here, there):
    each.close()


def test_other_agents_arrays_are_forgotten_when_they_are_many(
  monkeypatch,
):
  pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  monkeypatch.setattr('mooncake_jax.distributed.nixl_agent.MAX_KNOWN', 3)
  two = [NixlMover(f'{e}-{time.time()}', 'lo') for e in 'ab']
  with ends(two) as (wire, arrivals, _):
    kept = [part(seed=seed) for seed in range(10)]
    for seed, each in enumerate(kept):
      got = Got(arrivals, seed)
      send(wire, seed, each)
      np.testing.assert_array_equal(got.parts[0].slices[0], each.slices[0])
    (reader,) = two[1].readers
    assert all(len(peer.known) <= 3 for peer in reader.peers.values())
  for each in two:
    each.close()


def test_a_read_whose_offer_was_given_up_does_not_count():
  """Its arrays stay for a while, for the read may be under way."""
  pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  here, there = [NixlMover(f'{e}-{time.time()}', 'lo') for e in 'rs']
  server = socket.create_server(('127.0.0.1', 0))
  channel = Channel.to(server.getsockname(), 2.0)
  sender, _ = server.accept()
  inlet, outlet = here.inlet(), there.outlet()
  done = threading.Event()
  sent, into = [np.arange(9.0)], [np.zeros(9)]

  def help_on():
    while not done.wait(1e-4):
      there.offering.progress()

  helper = threading.Thread(target=help_on)
  helper.start()
  try:
    with pytest.raises(TimeoutError):
      with outlet.offer(sent, 0.2) as offer:
        raise TimeoutError('no answer')
    assert len(there.held) == 1
    sender.close()
    with pytest.raises(OSError, match='could not read'):
      inlet.fetch(offer.note, 0, into, channel, 5.0)
    time.sleep(0.25)
    with outlet.offer(sent, 0.2):
      assert not there.held
  finally:
    done.set()
    helper.join()
  for each in (inlet, outlet, channel, server, here, there):
    each.close()


def test_arrays_that_are_sent_twice_at_once_are_let_go_of_once():
  """NIXL 1.5.1 ends the process that registers and deregisters them twice."""
  pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  here, there = [NixlMover(f'{e}-{time.time()}', 'lo') for e in 'rs']
  with ends([there, here], limit=64 << 20) as (wire, arrivals, _):
    got, sent = Got(arrivals, 1), part((0, 4), 64)
    replica = Replica(wire.name, 1, b'')

    def work() -> None:
      for _ in range(20):
        assert wire.store_all([(replica, sent)] * 3) == [None] * 3

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(30)
    assert len(got.parts) == 180
    for arrived in got.parts:
      np.testing.assert_array_equal(arrived.slices[0], sent.slices[0])
    for agent in (*here.readers, there.offering):
      assert not agent.registered
  here.close()
  there.close()


def test_connections_have_agents_of_their_own_while_there_are_few(monkeypatch):
  """An agent of a connection that is closed serves the next."""
  pytest.importorskip('nixl_cu12', reason='NIXL is not installed')
  monkeypatch.setattr('mooncake_jax.distributed.nixl.MAX_READERS', 2)
  here, there = [NixlMover(f'{e}-{time.time()}', 'lo') for e in 'rs']
  with ends([there, here]) as (wire, arrivals, landing):
    wires = [wire, *(Wire('b', WireSpec(), there, 's') for _ in range(2))]
    for number, each in enumerate(wires):
      each.lead_to(landing.address)
      got = Got(arrivals, number)
      send(each, number, part(seed=number))
      arrived, expected = got.parts[0], part(seed=number)
      np.testing.assert_array_equal(arrived.slices[0], expected.slices[0])
    assert sorted(here.readers.values()) == [1, 2]
    until_s = time.monotonic() + 10
    for each in wires[:2]:
      each.close()
    while sum(here.readers.values()) > 1:
      assert time.monotonic() < until_s
      time.sleep(0.01)
    assert not any(reader.peers for reader, n in here.readers.items() if not n)
    got = Got(arrivals, 9)
    send(wires[0], 9, part())
    assert [*here.readers.values()] == [1, 1] and len(got.parts) == 1
    wires[2].close()
  here.close()
  there.close()
