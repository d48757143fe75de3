# SPDX-License-Identifier: Apache-2.0
"""Lanes and slots, which need no store: batches, deadlines, giving back."""

import threading
import time

import numpy as np
import pytest

from mooncake_jax.transfer.mooncake_arena import Arena
from mooncake_jax.transfer.mooncake_errors import FULL
from mooncake_jax.transfer.mooncake_errors import StoreTimeout
from mooncake_jax.transfer.mooncake_errors import StoreUnreachable
from mooncake_jax.transfer.mooncake_lane import Job
from mooncake_jax.transfer.mooncake_lane import Lane

NOTHING = np.empty(0, np.uint8)


class Calls:
  """Calls that a test holds up, and the keys of each."""

  def __init__(self):
    self.go = threading.Event()
    self.keys: list[list[str]] = []
    self.code = 0

  def run(self, jobs: list[Job]) -> list[int]:
    self.keys.append([job.key for job in jobs])
    self.go.wait(5)
    return [self.code] * len(jobs)

  def job(self, key: str, timeout_s: float = 5.0) -> Job:
    return Job(self.run, key, NOTHING, time.monotonic() + timeout_s)


@pytest.fixture
def calls():
  return Calls()


@pytest.fixture
def lane():
  made = Lane('lane', max_batch=4)
  yield made
  assert made.close(5)


def submit(lane: Lane, calls: Calls, *keys: str) -> list[Job]:
  """The first is alone in its call; the others wait behind it."""
  jobs = [calls.job(key) for key in keys]
  for job in jobs:
    lane.submit(job)
    while not calls.keys:
      time.sleep(0.001)
  return jobs


def test_what_waits_goes_in_one_call(lane, calls):
  jobs = submit(lane, calls, *'abcdef')
  calls.go.set()
  assert [job.result() for job in jobs] == [0] * 6
  assert calls.keys == [['a'], ['b', 'c', 'd', 'e'], ['f']]


def test_a_call_never_has_a_key_twice(lane, calls):
  jobs = submit(lane, calls, *'abbcb')
  calls.go.set()
  assert [job.result() for job in jobs] == [0] * 5
  assert calls.keys == [['a'], ['b'], ['b', 'c'], ['b']]


def test_a_call_that_hangs_costs_a_deadline_and_what_was_given_up(lane, calls):
  submit(lane, calls, 'a')
  late = calls.job('b', timeout_s=0.05)
  lane.submit(late)
  with pytest.raises(StoreTimeout, match='block b'):
    late.result()
  calls.go.set()
  (last,) = submit(lane, calls, 'c')
  assert last.result() == 0
  assert calls.keys == [['a'], ['c']]


def test_a_full_store_is_asked_again_until_the_deadline(lane, calls):
  calls.code = FULL
  calls.go.set()
  start_s = time.monotonic()
  job = calls.job('a', timeout_s=0.2)
  lane.submit(job)
  assert job.result() == FULL
  assert time.monotonic() - start_s < 1.0
  assert 3 < len(calls.keys)


def test_room_that_comes_in_time_is_taken(lane, calls):
  calls.code = FULL
  calls.go.set()
  job = calls.job('a')
  lane.submit(job)
  while len(calls.keys) < 3:
    time.sleep(0.001)
  calls.code = 0
  assert job.result() == 0


def test_a_closed_lane_fails_what_waits(calls):
  lane = Lane('lane', max_batch=4)
  _, waiting = submit(lane, calls, 'a', 'b')
  assert not lane.close(0.01)  # the call hangs
  with pytest.raises(StoreUnreachable, match='closed'):
    waiting.result()
  with pytest.raises(StoreUnreachable, match='closed'):
    lane.submit(calls.job('c'))
  calls.go.set()
  assert lane.close(5)


def test_a_slot_comes_back_with_its_last_array():
  arena = Arena(np.ones(3 * 4096, np.uint8), slot_bytes=100)
  slots = [arena.take(0.0) for _ in range(arena.num_slots)]
  assert arena.num_slots == 3 and not arena.num_free
  with pytest.raises(StoreTimeout, match='none of 3'):
    arena.take(0.01)
  view = slots[1][4:20].view(np.float32).reshape(2, 2)
  del slots
  assert arena.num_free == 2
  assert not view.any()
  del view
  assert arena.num_free == 3
