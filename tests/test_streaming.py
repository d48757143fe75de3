# SPDX-License-Identifier: Apache-2.0
"""Works named in `after`: layers leave as they are computed, a chunk waits
for its prefix layer by layer, and a failure reaches all that depend on it.

Each layer group takes 30 ms here, so whoever reads too early reads nothing.
"""

from collections.abc import Iterator
import functools
import time
from typing import Any

import jax
from jax import numpy as jnp
import pytest

from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import MODEL
from engine_pieces import ops_of
from engine_pieces import plain_tokens
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.model.prefill import prefill_chunk
from mooncake_jax.request import Sampling

GROUP_S = 0.03
FAR = 1e9


def _sleep(zero):
  time.sleep(GROUP_S)
  return zero


@functools.partial(jax.jit, static_argnames='config', donate_argnames='kv')
def slow_prefill(params, config, kv, x, table, start, length, *rest):
  """`prefill_chunk` that begins with a nap."""
  shape = jax.ShapeDtypeStruct((), start.dtype)
  start += jax.pure_callback(_sleep, shape, jnp.zeros_like(start))
  return prefill_chunk(params, config, kv, x, table, start, length, *rest)


@pytest.fixture(scope='module')
def desk() -> Iterator[Desk]:
  """Instances of one device; layers [0, 2) and [2, 3) are groups."""
  specs = [tiny_spec(name, layers_per_group=2) for name in 'ac']
  with tiny_backend(*specs, prefill_program=slow_prefill) as backend:
    warmup(backend)
    yield Desk(backend)


def chunk(tokens, pages, start=0, stop=None, last=True) -> PrefillChunk:
  stop = len(tokens) if stop is None else stop
  sampling = Sampling() if last else None
  return PrefillChunk(
    'r', 0, start, stop, tuple(pages), tokens[start:stop], sampling
  )


def handoff(source, target, layers=(0, 3)) -> tuple[TransferOp, ...]:
  return tuple(
    op
    for op in ops_of(DevicePages(*source), DevicePages(*target))
    if layers[0] <= op.start_layer < layers[1]
  )


def test_what_a_chunk_computes_leaves_layer_by_layer_and_whole(desk):
  tokens = random_tokens(16, seed=1)
  expected = plain_tokens(desk, tokens, 4)
  backend, here, there = desk.backend, tuple(range(1, 6)), tuple(range(31, 37))
  work = backend.prefill('a', chunk(tokens, here))
  ends = ('a', here[:4]), ('c', there[:4])
  first = backend.transfer(handoff(*ends, layers=(0, 2)), 0, FAR, (work,))
  rest = backend.transfer(handoff(*ends, layers=(2, 3)), 0, FAR, (work,))
  moved = [desk.end_of(w) for w in (first, rest)]
  end = desk.end_of(work)
  assert [m.status for m in moved] == ['completed'] * 2
  assert end.token == expected[0]
  assert desk.decode('c', expected[0], 16, there, 4) == expected[1:]
  # The first two layers were gone before the last one was computed.
  assert moved[0].time_s < end.time_s < moved[1].time_s
  assert end.spans == ((end.started_s, end.time_s),)
  assert end.time_s - end.started_s >= 2 * GROUP_S


def test_chunks_and_their_transfers_may_all_be_started_at_once(desk):
  tokens = random_tokens(43, seed=2)
  expected = plain_tokens(desk, tokens, 4)
  backend, here, there = desk.backend, tuple(range(1, 13)), tuple(range(31, 43))
  works, moves, before = [], [], ()
  for start in range(0, 43, 16):
    stop = min(start + 16, 43)
    works.append(
      backend.prefill('a', chunk(tokens, here, start, stop, stop == 43), before)
    )
    before = (works[-1],)
    pages = slice(start // 4, LAYOUT.pages_for(stop))
    ops = handoff(('a', here[pages]), ('c', there[pages]))
    moves.append(backend.transfer(ops, 0, FAR, before))
  assert all(desk.end_of(m).status == 'completed' for m in moves)
  assert desk.end_of(works[-1]).token == expected[0]
  assert desk.decode('c', expected[0], 43, there, 4) == expected[1:]


def test_a_chunk_waits_for_the_layers_of_its_prefix_only(desk):
  tokens = random_tokens(29, seed=3)
  expected = plain_tokens(desk, tokens, 4)
  backend, here, there = desk.backend, tuple(range(1, 9)), tuple(range(31, 41))
  prefix = backend.prefill('c', chunk(tokens, here, 0, 16))
  more = backend.prefill('c', chunk(tokens, here, 16, 24))
  ends = ('c', here[:6]), ('a', there[:6])
  fetch = backend.transfer(handoff(*ends), 0, FAR, (prefix, more))
  work = backend.prefill('a', chunk(tokens, there, 24), (fetch,))
  # The owner of 'a' is not held up by a chunk that waits.
  row = desk.decode('a', 1, 0, (90, 91), 6)
  assert len(row) == 6 and work not in desk.completions
  end = desk.end_of(work)
  assert end.status == 'completed' and end.token == expected[0]
  assert desk.decode('a', expected[0], 29, there, 4) == expected[1:]


def test_a_chunk_begins_while_the_last_layers_of_its_prefix_arrive(desk):
  tokens = random_tokens(20, seed=4)
  expected = plain_tokens(desk, tokens, 1)
  backend, here, there = desk.backend, tuple(range(1, 6)), tuple(range(31, 37))
  desk.prefill('c', tokens[:16], here)
  ends = ('c', here[:4]), ('a', there[:4])
  slow = backend.prefill('c', chunk(random_tokens(9, 0), range(60, 70)))
  soon = backend.transfer(handoff(*ends, layers=(0, 2)), 0, FAR)
  late = backend.transfer(handoff(*ends, layers=(2, 3)), 0, FAR, (slow,))
  end = desk.end_of(
    backend.prefill('a', chunk(tokens, there, 16), (soon, late))
  )
  assert end.token == expected[0]
  assert end.started_s < desk.end_of(late).time_s < end.time_s


def test_a_failure_reaches_what_depends_on_it_in_order(desk):
  backend, tokens = desk.backend, random_tokens(20, seed=5)
  gone = ops_of(Replica('a', 12345), DevicePages('a', (1, 2)))
  fetch = backend.transfer(gone, 0, FAR)
  work = backend.prefill('a', chunk(tokens, range(1, 6), 8, 20), (fetch,))
  after = backend.prefill('a', chunk(tokens, range(1, 6), 8, 20), (work,))
  moved = backend.transfer(
    handoff(('a', (1, 2)), ('c', (1, 2))), 0, FAR, (work,)
  )
  order = []
  while len(order) < 4:
    order += [c.work_id for c in desk.poll(backend.now_s() + 60)]
  assert order[:2] == [fetch, work] and {*order[2:]} == {after, moved}
  for failed, cause in ((work, fetch), (after, work), (moved, work)):
    end = desk.end_of(failed)
    assert end.status == 'failed' and f'work {cause},' in end.error
  assert set(desk.end_of(moved).op_status) == {'failed'}
  late = backend.transfer(handoff(('a', (1,)), ('c', (1,))), 0, FAR, (fetch,))
  assert f'work {fetch},' in desk.end_of(late).error
  desk.prefill('a', tokens[:5], (1, 2))


def test_a_late_or_cancelled_prefix_fails_the_chunk_and_frees_the_owner(desk):
  backend, tokens = desk.backend, random_tokens(20, seed=6)
  for stop, why in ((False, 'timeout'), (True, 'cancelled')):
    slow = backend.prefill('c', chunk(tokens, range(1, 6), 0, 16))
    ops = handoff(('c', (1, 2)), ('a', (1, 2)))
    # Without 'after' it waits for the chunk that writes its source, too.
    fetch = backend.transfer(
      ops, 0, FAR if stop else backend.now_s() + GROUP_S / 3
    )
    work = backend.prefill('a', chunk(tokens, range(1, 6), 8, 20), (fetch,))
    if stop:
      backend.cancel(fetch)
    assert desk.end_of(work).status == 'failed'
    assert desk.end_of(fetch).status == why and why in desk.end_of(work).error
    assert desk.end_of(slow).status == 'completed'
  desk.prefill('a', tokens[:5], (1, 2))


def test_a_deadline_runs_from_the_end_of_what_is_waited_for(desk):
  backend, tokens = desk.backend, random_tokens(16, seed=6)
  slow = backend.prefill('c', chunk(tokens, range(1, 6)))
  ops = handoff(('c', (1, 2)), ('a', (1, 2)))
  soon_s = backend.now_s() + GROUP_S  # before the chunk ends
  in_time = backend.transfer(ops, 0, soon_s, (slow,))
  assert desk.end_of(in_time).status == 'completed'
  held = backend.prefill('c', chunk(tokens, range(1, 6)))
  next_one = backend.prefill('c', chunk(tokens, range(1, 6)))
  reads_next = backend.transfer(ops, 0, FAR, (next_one,))
  late = backend.transfer(
    handoff(('a', (1, 2)), ('c', (3, 4))), 0, backend.now_s(), (held,)
  )
  assert desk.end_of(late).time_s > desk.end_of(held).time_s
  assert desk.end_of(late).status == 'timeout'  # it also waits for reads_next
  assert desk.end_of(reads_next).status == 'completed'


def test_a_chunk_that_waits_can_be_cancelled_and_fails_what_follows(desk):
  backend, tokens = desk.backend, random_tokens(20, seed=7)
  slow = backend.prefill('c', chunk(tokens, range(1, 6), 0, 16))
  fetch = backend.transfer(
    handoff(('c', (1, 2)), ('a', (1, 2))), 0, FAR, (slow,)
  )
  work = backend.prefill('a', chunk(tokens, range(1, 6), 8, 20), (fetch,))
  moved = backend.transfer(
    handoff(('a', (3, 4)), ('c', (7, 8))), 0, FAR, (work,)
  )
  backend.cancel(work)
  assert desk.end_of(work).status == 'cancelled'
  assert 'cancelled' in desk.end_of(moved).error
  # Its end was told only after that of what it waited for.
  assert desk.end_of(fetch).status == 'completed'


def test_a_chunk_cancelled_between_its_layer_groups_writes_no_more(desk):
  backend, tokens = desk.backend, random_tokens(16, seed=8)
  works = [backend.prefill('a', chunk(tokens, range(1, 6))) for _ in range(3)]
  moved = backend.transfer(
    handoff(('a', (1, 2)), ('c', (1, 2))), 0, FAR, (works[-1],)
  )
  desk.end_of(works[0])
  for work in works[1:]:
    backend.cancel(work)
  assert desk.end_of(works[2]).status == 'cancelled'
  assert desk.end_of(moved).status == 'failed'
  desk.prefill('a', tokens[:5], (1, 2))


def test_no_program_is_compiled_for_another_number_of_chunks(desk):
  programs = desk.backend.compiled_programs()
  program: Any = slow_prefill
  here = program._cache_size()
  for length in (1, 16, 17, 50, 90):
    desk.prefill('a', random_tokens(length, 9), range(1, 30))
  assert desk.backend.compiled_programs() == programs
  assert program._cache_size() == here
  assert MODEL.num_layers == 3  # two groups, one chunk bucket, two instances
  assert here == 4
