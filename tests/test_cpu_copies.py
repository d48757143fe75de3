# SPDX-License-Identifier: Apache-2.0
"""Pages copied by memcpy are those that the compiled copies give."""

from collections.abc import Iterator
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from engine_pieces import decode_row
from engine_pieces import Desk
from engine_pieces import NUM_PAGES
from engine_pieces import ops_of
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.model import pages as kv_pool
from mooncake_jax.transfer import cpu_copies

pytestmark = pytest.mark.skipif(
  jax.default_backend() != 'cpu', reason='copies of a CPU'
)


@pytest.fixture(scope='module')
def desk() -> Iterator[Desk]:
  """KV heads whole, split over two devices, and copied on four."""
  specs = [tiny_spec(n, num_devices=d) for n, d in zip('abd', (1, 2, 4))]
  with tiny_backend(*specs) as backend:
    desk = Desk(backend)
    for name in backend.instances:
      desk.prefill(name, random_tokens(32, seed=ord(name)), range(1, 9))
    yield desk


@pytest.mark.parametrize('name', 'abd')
@pytest.mark.parametrize('by_memcpy_out', [True, False])
@pytest.mark.parametrize('by_memcpy_in', [True, False])
def test_both_ways_move_the_same_bytes(desk, name, by_memcpy_out, by_memcpy_in):
  pool = desk.backend.instances[name].stages[0].desk.pool
  first, second = Replica(name, 1), Replica(name, 2)
  pool.copies_now = by_memcpy_out
  desk.move(DevicePages(name, (3, 5)), first)
  pool.copies_now = by_memcpy_in
  desk.move(first, DevicePages(name, (30, 20)))
  pool.copies_now = not by_memcpy_out
  desk.move(DevicePages(name, (30, 20)), second)
  block = desk.bytes_of(first)
  assert np.abs(block).min() > 0
  np.testing.assert_array_equal(block, desk.bytes_of(second))
  desk.backend.drop((first, second))
  pool.copies_now = True


def test_the_pool_is_still_written_in_place_by_what_follows(desk):
  pool = desk.backend.instances['a'].stages[0].desk.pool
  pointers = pool.pointers
  for i in range(3):
    desk.move(DevicePages('a', (3, 5)), Replica('a', i))
    desk.move(Replica('a', i), DevicePages('a', (30, 20)))
    desk.prefill('a', random_tokens(16, i), range(40, 48))
  assert pool.pointers == pointers
  desk.backend.drop(tuple(Replica('a', i) for i in range(3)))


def test_a_busy_pool_is_copied_by_programs_and_loses_nothing(desk):
  """Blocks go in and out between the steps of a decode work."""
  expected = desk.decode('a', 1, 0, range(100, NUM_PAGES), 90)
  row = decode_row('r', 1, 0, range(60, 60 + 28), 90)
  desk.move(DevicePages('a', (1, 2)), Replica('a', 1))
  work = desk.backend.decode('a', DecodeBatch((row,)), 90)
  moves = [
    desk.backend.transfer(ops, 0, 1e9)
    for i in range(10)
    for ops in (
      ops_of(Replica('a', 1), DevicePages('a', (20, 21))),
      ops_of(DevicePages('a', (20, 21)), Replica('a', 10 + i)),
    )
  ]
  for move in moves:
    assert desk.end_of(move).status == 'completed'
  desk.end_of(work)
  assert desk.tokens_of(work) == expected
  block = desk.bytes_of(Replica('a', 1))
  for i in range(10):
    np.testing.assert_array_equal(block, desk.bytes_of(Replica('a', 10 + i)))


def test_a_link_is_busy_no_longer_than_time_passes(desk):
  """Copies that wait for another program together count their own time."""
  backend = desk.backend
  stage = backend.instances['a'].stages[0].desk
  stage.pool.copies_now = False
  before_s, start_s = _busy_s(backend), time.perf_counter()
  square = jax.numpy.ones((1500, 1500))
  slow = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y @ x, x))
  stage.reader.expect(slow(square), lambda *times: None, lambda error: None)
  moves = [
    backend.transfer(
      ops_of(DevicePages('a', (i + 1, i + 2)), Replica('a', 50 + i)), 0, 1e9
    )
    for i in range(30)
  ]
  for move in moves:
    assert desk.end_of(move).status == 'completed'
  passed_s = time.perf_counter() - start_s
  assert 0 < _busy_s(backend) - before_s <= passed_s
  backend.drop(tuple(Replica('a', 50 + i) for i in range(30)))
  stage.pool.copies_now = True


def _busy_s(backend) -> float:
  return backend.transfers.counts()['a-host'].busy_s


def test_every_dtype_keeps_its_bits():
  for dtype in ('float32', 'bfloat16', 'float8_e4m3fn'):
    shape = (3, 6, 2, 4, 2, 8)
    bits = jax.random.bits(jax.random.key(0), shape, 'uint8')
    pool = jax.block_until_ready(bits.astype(dtype))
    pages = np.array([4, 1], np.int32)
    ((found,),) = cpu_copies.copy_out(pool, pages[None], 1, 3)
    expected = kv_pool.gather_pages(pool, pages, np.int32(1), 2)
    assert found.dtype == dtype
    assert np.asarray(expected).tobytes() == found.tobytes()


def test_freed_memory_stays_and_is_used_again(root):
  code = (
    'import resource, numpy as np\n'
    'from mooncake_jax.transfer.host_memory import keep_freed_memory\n'
    'def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n'
    'assert keep_freed_memory()\n'
    'np.ones(40 << 20, np.uint8)\n'
    'before = faults()\n'
    'np.ones(40 << 20, np.uint8)\n'
    'print(faults() - before)\n'
  )
  run = subprocess.run(
    [sys.executable, '-c', code], cwd=root, capture_output=True, text=True
  )
  if 'AssertionError' in run.stderr:
    pytest.skip('not glibc')
  assert int(run.stdout) < 500, run.stderr
