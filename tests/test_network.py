# SPDX-License-Identifier: Apache-2.0
"""Parts between hosts: a slow line, packets that are lost, a cut cable."""

from contextlib import contextmanager
import socket
import subprocess
import time

import numpy as np
import pytest

from mooncake_jax.backend import Replica
from mooncake_jax.distributed.landing import Landing
from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.offers import PartShape
from mooncake_jax.distributed.probe import measure_wire
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.segment import Part
from scripts.benches.namespaces import BURST_BYTES
from scripts.benches.namespaces import hosts
from scripts.benches.namespaces import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or '-')
SHAPE = PartShape(4, 2, 64, 512, np.dtype(np.float32))


@pytest.fixture(scope='module')
def two():
  with hosts(2) as made:
    yield made


@pytest.fixture
def line(two):
  """Two hosts on a fast line, as it was at first."""
  yield two
  for host in two:
    host.lose(0)
    host.limit(1e9)


@contextmanager
def ends(near, far, stall_s=2.0):
  """A wire on the far host that leads to the near one, and what arrives."""
  mover = make_mover('tcp', 'n')
  spec = WireSpec('tcp', bind=near.address, checksums=True, stall_s=stall_s)
  arrivals = Arrivals(64 << 20)
  with near.inside():
    landing = Landing(spec, SHAPE, mover, arrivals, 's')
  wire = Wire('near', spec, mover, 's')
  wire.lead_to(landing.address)
  try:
    with far.inside():
      yield wire, arrivals
  finally:
    wire.close()
    arrivals.close()
    landing.close()


def part(seed: int) -> Part:
  shape = (4, 2, 512, 2, 64)  # 2 MiB
  rng = np.random.default_rng(seed)
  return Part(0, 4, (rng.standard_normal(shape, np.float32),))


def send(wire: Wire, arrivals: Arrivals, number: int, sent: Part) -> bool:
  """Whether the part arrived as it was."""
  got = []
  arrivals.expect(number, lambda it, left: got.append((it, left)), got.append)
  wire.store(Replica(wire.name, number, b''), sent)
  ((arrived, left),) = got
  left()
  return np.array_equal(arrived.slices[0], sent.slices[0])


def test_a_line_takes_the_time_that_its_bits_take(line):
  near, far = line
  far.limit(80e6)
  with ends(near, far) as (wire, arrivals):
    wire.greet(SHAPE.part())
    sent, begun_s = part(1), time.perf_counter()
    assert send(wire, arrivals, 1, sent)
    least_s = (sent.num_bytes - 2 * BURST_BYTES) / 10e6
    assert time.perf_counter() - begun_s > least_s


def test_a_measured_line_is_as_slow_as_it_is(line):
  near, far = line
  far.limit(80e6)
  with ends(near, far) as (wire, _):
    with far.inside():
      tier = FarTier(wire, lambda name, error: None, 1 << 20, 2)
    speed = measure_wire(wire, tier.write_link, SHAPE.part(1, 256))  # 256 KiB
    tier.close()
  assert 5e6 < speed.bytes_per_s < 10e6
  assert speed.transfer_s(10 << 20) > 1.0


def test_packets_are_lost_and_parts_arrive_whole(line):
  near, far = line
  near.lose(0.01)
  assert 0 < lost_of(near, far, 2000) < 100
  with ends(near, far) as (wire, arrivals):
    for number in range(8):
      assert send(wire, arrivals, number, part(number))


def lost_of(near, far, count: int) -> int:
  """Of so many datagrams to a host, those that did not come."""
  kind = socket.AF_INET, socket.SOCK_DGRAM
  with near.inside():
    taker = socket.socket(*kind)
  with far.inside():
    sender = socket.socket(*kind)
  with taker, sender:
    taker.bind((near.address, 0))
    taker.setblocking(False)
    came = 0
    for _ in range(count):
      sender.sendto(b'one', taker.getsockname())
      came += heard(taker)
    taker.settimeout(0.1)
    while heard(taker):
      came += 1
    return count - came


def heard(taker: socket.socket) -> bool:
  try:
    return bool(taker.recv(8))
  except (BlockingIOError, TimeoutError):
    return False


def test_a_cut_cable_fails_a_send_in_time_and_mended_it_carries_again(line):
  near, far = line
  with ends(near, far, stall_s=0.5) as (wire, arrivals):
    assert send(wire, arrivals, 1, part(1))
    near.lose(1)
    begun_s = time.monotonic()
    with pytest.raises(OSError):
      send(wire, arrivals, 2, part(2))
    assert time.monotonic() - begun_s < 4.0
    near.lose(0)
    assert send(wire, arrivals, 3, part(3))


def test_what_was_made_is_removed():
  listed = 'ip', 'netns', 'list'
  before = subprocess.check_output(listed)
  with hosts(1) as (host,):
    assert host.name.encode() in subprocess.check_output(listed)
    with pytest.raises(ValueError, match='share=1.5'):
      host.lose(1.5)
  assert subprocess.check_output(listed) == before
