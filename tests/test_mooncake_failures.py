# SPDX-License-Identifier: Apache-2.0
"""Members and masters of a real Mooncake Store that die or hang."""

from contextlib import contextmanager
import os
import signal
import sys
import threading
import time

import pytest

from mooncake_jax.transfer import mooncake_client
from mooncake_jax.transfer.mooncake_client import import_wheel
from mooncake_jax.transfer.mooncake_config import MooncakeConfig
from mooncake_jax.transfer.mooncake_errors import BlockMissing
from mooncake_jax.transfer.mooncake_errors import MooncakeError
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_store import MooncakeSegment
from scripts.mooncake_master import free_port
from scripts.mooncake_master import main
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage
from scripts.mooncake_master import Server
from tests.mooncake_pieces import BLOCK
from tests.mooncake_pieces import is_right
from tests.mooncake_pieces import MIB
from tests.mooncake_pieces import open_segment
from tests.mooncake_pieces import put
from tests.mooncake_pieces import read
from tests.mooncake_pieces import replica_of
from tests.mooncake_pieces import running_peer

try:
  import_wheel('mooncake.store')
except ImportError as missing:
  pytest.skip(str(missing), allow_module_level=True)

# Deadline of a call, and what a thread may take to see that it passed.
LIMIT_S = 3.0
SLACK_S = 0.5


@pytest.fixture
def master():
  with running_master(lease_s=0.2, client_ttl_s=1) as server:
    yield server


@pytest.fixture
def segment(master: Server):
  """A member that lends nothing."""
  made = open_segment(master.address, timeout_s=LIMIT_S)
  yield made
  made.close()


def freeze(server: Server) -> None:
  """Stops a process and waits until it has stopped."""
  os.kill(server.process.pid, signal.SIGSTOP)
  os.waitpid(server.process.pid, os.WUNTRACED)


@contextmanager
def within(limit_s: float):
  start_s = time.monotonic()
  yield
  assert time.monotonic() - start_s < limit_s + SLACK_S


def test_a_killed_owner_s_blocks_are_lost_and_room_returns(master, segment):
  with running_storage(master.address, 16 * MIB) as owner:
    put(segment, 1)
    assert is_right(read(segment, 1), 1)
    owner.kill()
    with within(LIMIT_S), pytest.raises(MooncakeError):
      read(segment, 1)
    with within(LIMIT_S), pytest.raises(MooncakeError):
      put(segment, 2)
  until_s = time.monotonic() + 10
  with running_storage(master.address, 16 * MIB):
    while time.monotonic() < until_s:
      try:
        put(segment, 3, replica_id=time.monotonic_ns())
        break
      except MooncakeError:
        time.sleep(0.1)
    assert is_right(read(segment, 3), 3)
    while segment.exists([replica_of(1).key]) == [True]:  # not yet forgotten
      assert time.monotonic() < until_s
      time.sleep(0.1)
    with pytest.raises(BlockMissing):
      read(segment, 1, replica_id=99)


def test_the_other_replica_serves_when_an_owner_is_killed(master):
  with running_peer(master.address, lent_bytes=16 * MIB) as peer:
    with running_storage(master.address, 16 * MIB):
      segment = open_segment(master.address, replicas=2, timeout_s=LIMIT_S)
      for number in range(8):
        put(segment, number)
      peer.process.kill()
      peer.process.wait()
      until_s = time.monotonic() + 10
      for number in range(8):  # at the latest when the master forgot it
        while not _reads(segment, number):
          assert time.monotonic() < until_s
      segment.close()


def _reads(segment, number: int) -> bool:
  try:
    with within(LIMIT_S):
      block_L2SKH = read(segment, number, time.monotonic_ns())
  except MooncakeError:
    return False
  assert is_right(block_L2SKH, number)
  return True


def test_a_member_killed_while_it_puts_leaves_no_wrong_block(master, segment):
  with running_storage(master.address, 64 * MIB):
    for turn in range(3):
      with running_peer(master.address) as peer:
        numbers = range(100 * turn, 100 * turn + 100)
        assert peer.process.stdin
        print('put', *numbers, file=peer.process.stdin, flush=True)
        time.sleep(0.05)
        peer.process.kill()
        peer.process.wait()
      found = [_find(segment, number) for number in numbers]
      assert not found[-1]
      put(segment, numbers[-1], replica_id=-turn - 1)


def test_who_waits_for_a_store_has_nothing_until_it_is_there():
  address = f'127.0.0.1:{free_port()}'
  with pytest.raises(StoreUnreachable):
    open_segment(address, timeout_s=LIMIT_S)
  config = MooncakeConfig(address, timeout_s=LIMIT_S, pause_s=0.05)
  segment = MooncakeSegment('mooncake', config, BLOCK, 1 << 40, waits=True)
  for _ in range(3):
    with within(0.0), pytest.raises(StoreUnreachable, match='not joined'):
      segment.exists([replica_of(1).key])
    with within(0.0), pytest.raises(StoreUnreachable):
      put(segment, 1)
    with within(0.0), pytest.raises(StoreUnreachable):
      read(segment, 1)
    time.sleep(0.1)
  assert not segment.used_bytes
  port, until_s = int(address.rpartition(':')[2]), time.monotonic() + 20
  with running_master(port=port) as master:
    with running_storage(master.address, 16 * MIB):
      while not _there(segment):
        assert time.monotonic() < until_s
        time.sleep(0.05)
      put(segment, 1, replica_id=-1)
      assert is_right(read(segment, 1, replica_id=-2), 1)
    segment.close()


def test_who_waits_in_vain_leaves_nothing_open():
  config = MooncakeConfig(f'127.0.0.1:{free_port()}', pause_s=0.01)
  segment = MooncakeSegment('mooncake', config, BLOCK, 1 << 40, waits=True)
  for _ in range(5):
    assert not _there(segment)
    time.sleep(0.02)
  segment.close()
  assert not _there(segment)
  until_s = time.monotonic() + 10
  while any(t.name.startswith('mooncake-join') for t in threading.enumerate()):
    assert time.monotonic() < until_s
    time.sleep(0.01)


def _there(segment) -> bool:
  try:
    return segment.exists([replica_of(1).key]) == [False]
  except StoreUnreachable:
    return False


def _find(segment, number: int) -> bool:
  """Whether a block is there; wrong bytes would fail."""
  try:
    assert is_right(read(segment, number), number)
  except BlockMissing:
    return False
  return True


def test_a_killed_master_fails_all_calls_in_time(master, segment):
  with running_storage(master.address, 16 * MIB):
    put(segment, 1)
    master.kill()
    for _ in range(2):
      with within(LIMIT_S), pytest.raises((StoreUnreachable, StoreTimeout)):
        read(segment, 1)
      with within(LIMIT_S), pytest.raises((StoreUnreachable, StoreTimeout)):
        put(segment, 2)
      with within(LIMIT_S), pytest.raises((StoreUnreachable, StoreTimeout)):
        segment.exists([replica_of(1).key])
    assert not segment._blocks.keys() - {1}


def test_a_master_that_hangs_costs_one_deadline_then_nothing(master, segment):
  with running_storage(master.address, 16 * MIB):
    put(segment, 1)
    freeze(master)
    with within(LIMIT_S), pytest.raises(StoreTimeout):
      read(segment, 1)
    for number in range(2, 6):  # while it pauses
      with within(0.0), pytest.raises(StoreUnreachable, match='a moment ago'):
        put(segment, number)
    os.kill(master.process.pid, signal.SIGCONT)
    until_s = time.monotonic() + 5
    while not _reads(segment, 1):
      assert time.monotonic() < until_s


def test_a_hanging_master_takes_no_member(master):
  freeze(master)
  with within(LIMIT_S), pytest.raises((StoreUnreachable, StoreTimeout)):
    open_segment(master.address, timeout_s=LIMIT_S)
  os.kill(master.process.pid, signal.SIGCONT)


def test_what_is_not_installed_is_said_in_a_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'mooncake', None)
  with pytest.raises(ImportError, match=r"'mooncake_jax\[mooncake\]'"):
    mooncake_client.import_wheel('mooncake.nothing')
  monkeypatch.undo()
  monkeypatch.setattr(sys, 'path', [])
  monkeypatch.delitem(sys.modules, 'mooncake', raising=False)
  assert main([]) == 1
  assert capsys.readouterr().err.startswith('error: mooncake_master is not')
