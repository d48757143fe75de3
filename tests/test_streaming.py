# SPDX-License-Identifier: Apache-2.0
"""Works named in `after`: layers leave as they are computed, a chunk waits
for its prefix layer by layer, and a failure reaches all that depend on it.

Layers [0, 2) and [2, 3) are groups of one stage, or stages. Each takes 30 ms
here, so whoever reads too early reads nothing.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from engine_pieces import CHUNK
from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import ops_of
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.request import Sampling
from scripts.benches.fixed_stages import napping

GROUP_S = 0.03
FAR = 1e9
PROGRAMS = napping(GROUP_S)
KINDS = {
  'groups': {'layers_per_group': 2},
  'mpmd': {'role': 'prefill', 'stage_layers': (2, 1)},
  'spmd': {'role': 'prefill', 'stage_layers': (2, 1), 'executor': 'spmd'},
}


@pytest.fixture(scope='module', params=[*KINDS])
def desk(request) -> Iterator[Desk]:
  """Instance 'a' is what is tested, 'c' has all layers on one device."""
  specs = tiny_spec('a', **KINDS[request.param]), tiny_spec('c')
  with tiny_backend(*specs, prefill_programs=PROGRAMS) as backend:
    warmup(backend)
    yield Desk(backend)


def plain_tokens(desk: Desk, tokens, count: int) -> list[int]:
  """First token and `count` more, by 'c' alone."""
  pages = range(100, 128)
  first = desk.prefill('c', tokens, pages)
  return [first, *desk.decode('c', first, len(tokens), pages, count)]


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
  assert end.spans[0][0] == end.started_s < end.time_s == end.spans[-1][1]
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
  desk.move(DevicePages('a', (90, 91)), DevicePages('a', (92, 93)))
  assert work not in desk.completions
  end = desk.end_of(work)
  assert end.status == 'completed' and end.token == expected[0]
  desk.move(DevicePages('a', there[:8]), DevicePages('c', here))
  assert desk.decode('c', expected[0], 29, (*here, 90), 4) == expected[1:]


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


def test_chunks_of_two_requests_follow_each_other_without_a_gap(desk):
  backend = desk.backend
  tokens = [random_tokens(CHUNK, seed) for seed in (10, 11)]
  expected = [plain_tokens(desk, t, 1)[0] for t in tokens]
  works = [
    backend.prefill('a', chunk(t, range(1 + 9 * i, 6 + 9 * i)))
    for i, t in enumerate(tokens * 3)
  ]
  ends = [desk.end_of(work) for work in works]
  assert [end.token for end in ends] == expected * 3
  spans = [end.spans for end in ends]
  for stage in range(len(spans[0])):
    ordered = [span[stage] for span in spans]
    assert ordered == sorted(ordered)
  if len(spans[0]) > 1:  # the second is on the first stage by then
    assert spans[1][0][0] < spans[0][1][1] and spans[2][0][0] < spans[1][1][1]


def test_no_program_is_compiled_for_another_number_of_chunks(desk):
  counts = _compiled(desk)
  for length in (1, 16, 17, 50, 90):
    desk.prefill('a', random_tokens(length, 9), range(1, 30))
  assert _compiled(desk) == counts


def _compiled(desk: Desk) -> tuple[int, ...]:
  napped: Any = PROGRAMS
  counts = (program._cache_size() for program in napped)
  return desk.backend.compiled_programs(), *counts


def test_pools_are_written_in_place(desk):
  pools = [stage.desk.pool for stage in desk.backend.instances['a'].stages]
  before = [pool.pointers for pool in pools]
  desk.prefill('a', random_tokens(43, 12), range(1, 12))
  desk.move(DevicePages('a', (1, 2)), DevicePages('a', (3, 4)))
  desk.prefill('a', random_tokens(20, 12), range(1, 12))
  assert [pool.pointers for pool in pools] == before
