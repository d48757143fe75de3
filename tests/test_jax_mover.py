# SPDX-License-Identifier: Apache-2.0
"""JAX's transfer server: between two processes, killed, and never answered."""

from contextlib import contextmanager
import gc
import multiprocessing
import socket
import time
import weakref

import numpy as np
import pytest

from mooncake_jax.distributed.channel import Channel
from mooncake_jax.distributed.jax_pull import JaxMover
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.transfer.entries import aligned
from wire_pieces import ends
from wire_pieces import Got
from wire_pieces import part
from wire_pieces import send


@pytest.fixture(scope='module')
def mover():
  made = JaxMover('127.0.0.1')
  yield made
  made.close()


def far(address, questions) -> None:
  """Another process: sends the part that it is asked for."""
  wire = Wire('b', WireSpec('jax', checksums=True), JaxMover('127.0.0.1'), 's')
  wire.lead_to(address)
  while True:
    number, seed = questions.recv()
    try:
      send(wire, number, part((0, 4), 64, seed=seed))
    except OSError as error:
      questions.send(str(error))
    else:
      questions.send('')


@contextmanager
def another_process(address):
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  process = context.Process(target=far, args=(address, theirs), daemon=True)
  process.start()
  try:
    yield process, ours
  finally:
    process.kill()
    process.join()


def test_parts_come_from_another_process_until_it_is_killed(mover):
  size = part((0, 4), 64).num_bytes
  with ends([mover, mover], limit=size, checksums=True) as (_, arrivals, near):
    with another_process(near.address) as (process, asked):
      got = Got(arrivals, 1)
      for seed in range(3):
        asked.send((1, seed))
        assert asked.poll(60) and asked.recv() == ''
        expected = part((0, 4), 64, seed=seed)
        np.testing.assert_array_equal(
          got.parts[-1].slices[0], expected.slices[0]
        )
        if seed < 2:
          got.lefts[-1]()
      asked.send((1, 3))  # which waits for room
      time.sleep(0.3)
      process.kill()
      process.join()
      got.lefts[-1]()
      until_s = time.monotonic() + 10
      while near.num_connections or arrivals.taken_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)
      assert len(got.parts) == 3


def test_what_was_never_offered_is_given_up_in_time(mover):
  server = socket.create_server(('127.0.0.1', 0))
  channel = Channel.to(server.getsockname(), 2.0)
  inlet, outlet = mover.inlet(), mover.outlet()
  sent, into = np.arange(9.0), np.zeros(9)
  note = {'server': mover.server.address(), 'numbers': [1 << 61]}
  begun_s = time.monotonic()
  with pytest.raises(OSError, match='pulled nothing'):
    inlet.fetch(note, 0, [into], channel, 0.5)
  assert 0.4 < time.monotonic() - begun_s < 4.0
  for bad in ({}, {**note, 'numbers': []}, {**note, 'numbers': ['x']}):
    with pytest.raises(ValueError, match='without numbers'):
      inlet.fetch(bad, 0, [into], channel, 0.5)
  with outlet.offer([sent], 1.0) as offer:
    inlet.fetch(offer.note, 0, [into], channel, 5.0)
  np.testing.assert_array_equal(into, sent)
  for each in (inlet, outlet, channel, server):
    each.close()


def test_an_offer_that_nobody_pulls_is_freed_by_its_sender(mover):
  outlet = mover.outlet()
  memory = aligned(1 << 20)  # which a CPU device takes as it is
  gone = weakref.ref(memory.base)
  with pytest.raises(TimeoutError):
    with outlet.offer([memory], 0.1):
      raise TimeoutError('no answer')
  del memory
  gc.collect()  # the error's frames
  assert gone() is not None
  until_s = time.monotonic() + 20
  while gone() is not None:
    mover.held.release()
    gc.collect()
    assert time.monotonic() < until_s
    time.sleep(0.05)
