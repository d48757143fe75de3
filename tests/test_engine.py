# SPDX-License-Identifier: Apache-2.0
"""The device backend: the same tokens whatever way, nothing lost or mixed."""

from collections.abc import Iterator
import threading
import time

import jax
import numpy as np
import pytest

from engine_pieces import decode_row
from engine_pieces import Desk
from engine_pieces import LAYOUT
from engine_pieces import NUM_PAGES
from engine_pieces import ops_of
from engine_pieces import plain_tokens
from engine_pieces import random_tokens
from engine_pieces import tiny_backend
from engine_pieces import tiny_spec
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.engine.decode_run import DecodeRun
from mooncake_jax.engine.decode_run import DecodeTask
from mooncake_jax.engine.warmup import warmup
from mooncake_jax.request import Sampling


@pytest.fixture(scope='module')
def desk() -> Iterator[Desk]:
  """Instances a and c on one device each, b tensor parallel over two."""
  specs = tiny_spec('a'), tiny_spec('b', num_devices=2), tiny_spec('c')
  with tiny_backend(*specs) as backend:
    warmup(backend)
    yield Desk(backend)


@pytest.mark.parametrize('chunk', [1, 3, 4, 7, 16])
def test_chunked_prefill_gives_the_tokens_of_a_whole_one(desk, chunk):
  tokens = random_tokens(16, seed=1)
  expected = plain_tokens(desk, tokens, 5)
  pages = range(1, 8)
  first = desk.prefill('a', tokens, pages, chunk=chunk)
  assert [first, *desk.decode('a', first, 16, pages, 5)] == expected


@pytest.mark.parametrize('prefill, decode', ['ac', 'ba', 'ab', 'bc'])
def test_handoff_by_layer_ranges_gives_the_tokens_of_one_instance(
  desk, prefill, decode
):
  tokens = random_tokens(37, seed=2)
  expected = plain_tokens(desk, tokens, 6)
  there, here = tuple(range(1, 12)), tuple(range(31, 42))
  first = desk.prefill(prefill, tokens, there)
  used = LAYOUT.pages_for(len(tokens))
  desk.move(
    DevicePages(prefill, there[:used]), DevicePages(decode, here[:used])
  )
  assert [first, *desk.decode(decode, first, 37, here, 6)] == expected


@pytest.mark.parametrize('putter, getter', ['ac', 'ba', 'ab'])
def test_a_reused_prefix_gives_the_tokens_of_a_computed_one(
  desk, putter, getter
):
  tokens = random_tokens(29, seed=3)
  expected = plain_tokens(desk, tokens, 4)
  pages = tuple(range(1, 10))
  desk.prefill(putter, tokens[:24], pages)
  replicas = [Replica(putter, 1000 + i) for i in range(3)]
  for i, replica in enumerate(replicas):
    desk.move(DevicePages(putter, LAYOUT.block_pages(pages, i)), replica)
  pages = tuple(range(41, 51))
  for i, replica in enumerate(replicas):
    desk.move(replica, DevicePages(getter, LAYOUT.block_pages(pages, i)))
  first = desk.prefill(getter, tokens, pages, start=24)
  assert [first, *desk.decode(getter, first, 29, pages, 4)] == expected
  desk.backend.drop(tuple(replicas))


def test_cancel_ends_a_decode_at_a_step_boundary_with_right_tokens(desk):
  tokens = random_tokens(9, seed=4)
  pages = range(100, NUM_PAGES)
  first = desk.prefill('a', tokens, pages)
  expected = desk.decode('a', first, 9, pages, 90)
  row = decode_row('r', first, 9, pages, 90)
  work = desk.backend.decode('a', DecodeBatch((row,)), 1000)
  while len(desk.tokens_of(work)) < 3:
    desk.poll()
  desk.backend.cancel(work)
  end = desk.end_of(work)
  got = desk.tokens_of(work)
  assert end.status == 'completed'
  assert 3 <= len(got) < 90 and got == expected[: len(got)]
  rest = desk.decode('a', got[-1], 9 + len(got), pages, 90 - len(got))
  assert got + rest == expected


def test_a_cancelled_decode_that_never_began_completes_without_rows(desk):
  hold = desk.backend.decode(
    'a', DecodeBatch((decode_row('r', 1, 0, (1, 2), 8),)), 8
  )
  desk.end_of(hold)
  work = desk.backend.decode(
    'a', DecodeBatch((decode_row('r', 1, 0, (1, 2), 8),)), 8
  )
  desk.backend.cancel(work)
  assert desk.end_of(work).status == 'completed'


def test_a_stop_token_ends_the_work_and_nothing_follows_it(desk):
  tokens, pages = random_tokens(9, seed=4), range(100, NUM_PAGES)
  first = desk.prefill('a', tokens, pages)
  expected = desk.decode('a', first, 9, pages, 40)
  stop = expected[3]
  assert stop not in expected[:3]
  other = desk.prefill('a', random_tokens(6, seed=5), range(1, 20))
  rows = (
    decode_row('r', first, 9, pages, 40, stop_token_ids=(stop,)),
    decode_row('s', other, 6, range(1, 20), 40),
  )
  work = desk.backend.decode('a', DecodeBatch(rows), 40)
  assert desk.end_of(work).status == 'completed'
  assert desk.tokens_of(work) == expected[:4]
  # The step ahead was under way: the other row keeps its token.
  assert len(desk.tokens_of(work, 's')) in (4, 5)


def test_rows_end_at_max_steps_and_at_the_shortest_row(desk):
  rows = (
    decode_row('r', 1, 0, (1, 2), 3),
    decode_row('s', 1, 0, (3, 4), 8),
  )
  work = desk.backend.decode('a', DecodeBatch(rows), 8)
  desk.end_of(work)
  assert len(desk.tokens_of(work)) == len(desk.tokens_of(work, 's')) == 3
  work = desk.backend.decode('a', DecodeBatch(rows), 2)
  desk.end_of(work)
  assert len(desk.tokens_of(work)) == 2


def test_each_step_is_a_completion_with_its_time(desk):
  row = decode_row('r', 1, 0, (1, 2, 3), 6)
  work = desk.backend.decode('a', DecodeBatch((row,)), 6)
  desk.end_of(work)
  steps = desk.completions[work]
  assert [c.done for c in steps] == [False] * 5 + [True]
  times = [c.steps[0].segment.first_s for c in steps]
  assert times == sorted(times) and times[0] >= steps[0].started_s > 0


def test_a_row_never_writes_beyond_its_pages(desk):
  victim = (20, 21)
  desk.prefill('a', random_tokens(8, seed=6), victim)
  desk.move(DevicePages('a', victim), Replica('a', 2000))
  row = decode_row('r', 1, 0, (10, 11), 8, stop_token_ids=())
  desk.end_of(desk.backend.decode('a', DecodeBatch((row,)), 100))
  desk.move(DevicePages('a', victim), Replica('a', 2001))
  before, after = (desk.bytes_of(Replica('a', i)) for i in (2000, 2001))
  np.testing.assert_array_equal(before, after)
  desk.backend.drop((Replica('a', 2000), Replica('a', 2001)))


@pytest.mark.parametrize(
  'chunk, why',
  [
    (PrefillChunk('r', 0, 0, 4, (1,)), 'needs 4 tokens'),
    (PrefillChunk('r', 0, 0, 9, (1, 2), random_tokens(9, 0)), 'do not cover'),
    (PrefillChunk('r', 0, 0, 17, (1,) * 9, random_tokens(17, 0)), 'bucket'),
    (PrefillChunk('r', 0, 0, 4, (999,), random_tokens(4, 0)), 'not in'),
    (PrefillChunk('r', 0, 126, 129, (1,) * 40, random_tokens(3, 0)), 'exceed'),
  ],
)
def test_a_chunk_that_cannot_be_computed_fails_and_the_next_one_runs(
  desk, chunk, why
):
  end = desk.end_of(desk.backend.prefill('a', chunk))
  assert end.status == 'failed'
  assert why in end.error and '\n' not in end.error
  desk.prefill('a', random_tokens(5, seed=7), (1, 2))


def test_a_decode_that_cannot_run_fails_and_the_next_one_runs(desk):
  for rows in ((), (decode_row('r', 1, 0, (1,), 8),)):
    end = desk.end_of(desk.backend.decode('a', DecodeBatch(rows), 8))
    assert end.status == 'failed' and 'ValueError' in end.error
  assert len(desk.decode('a', 1, 0, (1, 2), 8)) == 8


def test_cancelled_chunks_that_wait_end_as_cancelled(desk):
  chunk = PrefillChunk('r', 0, 0, 16, (1, 2, 3, 4), random_tokens(16, 0))
  works = [desk.backend.prefill('a', chunk) for _ in range(40)]
  desk.backend.cancel(works[-1])
  ends = [desk.end_of(work) for work in works]
  assert [end.status for end in ends[:-1]] == ['completed'] * 39
  assert ends[-1].status == 'cancelled'
  starts = [end.started_s for end in ends[:-1]]
  assert starts == sorted(starts)


def test_the_pool_is_written_in_place(desk):
  before = pointers(desk)
  for name in 'ab':
    first = desk.prefill(name, random_tokens(21, seed=8), range(1, 12))
    desk.decode(name, first, 21, range(1, 12), 5)
    desk.move(DevicePages(name, (1, 2)), DevicePages('c', (3, 4)))
  assert pointers(desk) == before


def pointers(desk):
  return [
    stage.desk.pool.pointers
    for instance in desk.backend.instances.values()
    for stage in instance.stages
  ]


def test_serving_compiles_nothing_after_warmup(desk):
  programs = desk.backend.compiled_programs()
  tokens = random_tokens(43, seed=9)
  for name, other in ('ab', 'bc', 'ca'):
    pages = tuple(range(1, 16))
    first = desk.prefill(name, tokens, pages, chunk=11)
    desk.decode(name, first, 43, pages, 7)
    desk.move(DevicePages(name, pages[:11]), DevicePages(other, pages[:11]))
    replica = Replica(name, 3000)
    desk.move(DevicePages(name, pages[:2]), replica)
    desk.move(replica, DevicePages(other, pages[2:4]))
    desk.backend.drop((replica,))
  rows = [decode_row(f'{i}', 1, 0, (i + 1,), 4) for i in range(3)]
  rows[1] = decode_row(
    '1', 1, 0, (9,), 4, sampling=Sampling(0.7, top_k=5, top_p=0.9, seed=3)
  )
  desk.end_of(desk.backend.decode('a', DecodeBatch(tuple(rows)), 4))
  assert desk.backend.compiled_programs() == programs


def test_a_step_is_dispatched_before_the_last_ones_tokens_are_read(
  desk, monkeypatch
):
  model = desk.backend.instances['c'].stages[0].desk.model
  order, step = [], model.step

  def recorded(state):
    order.append('dispatch')
    return step(state)

  monkeypatch.setattr(model, 'step', recorded)
  batch = DecodeBatch((decode_row('r', 1, 0, (1, 2), 4),))
  read = lambda _: order.append('read')  # noqa: E731
  with jax.set_mesh(model.pool.mesh):  # its owner has nothing to do
    run = DecodeRun(DecodeTask(0, batch, 4, time.perf_counter, read), model)
    while run.advance():
      pass
  ahead = ['dispatch', 'read'] * 3
  assert order == ['dispatch', *ahead, 'read']


def test_a_transfer_reads_pages_after_the_chunks_begun_before_it(desk):
  tokens = random_tokens(32, seed=10)
  expected = plain_tokens(desk, tokens, 4)
  here, there = tuple(range(1, 10)), tuple(range(51, 60))
  works = [
    desk.backend.prefill(
      'a',
      PrefillChunk('r', 0, s, s + 16, here, tokens[s : s + 16], Sampling()),
    )
    for s in (0, 16)
  ]
  ops = ops_of(DevicePages('a', here[:8]), DevicePages('c', there[:8]))
  moved = desk.backend.transfer(ops, 0, 1e9)
  # Written over right after: the copy must have been taken before.
  works += [
    desk.backend.prefill(
      'a', PrefillChunk('x', 0, s, s + 16, here, random_tokens(16, s))
    )
    for s in (0, 16)
  ]
  ends = [desk.end_of(work) for work in works]
  assert desk.end_of(moved).status == 'completed'
  first = ends[1].token
  assert first == expected[0]
  assert desk.decode('c', first, 32, there, 4) == expected[1:]


def test_many_works_in_flight_never_touch_each_others_pages(desk):
  """Random prompts prefilled, stored, fetched, handed over and decoded."""
  rng = np.random.default_rng(0)
  prompts = [random_tokens(int(rng.integers(9, 30)), 20 + i) for i in range(8)]
  expected = [plain_tokens(desk, prompt, 6) for prompt in prompts]
  backend = desk.backend
  pages = [tuple(range(1 + 9 * i, 10 + 9 * i)) for i in range(8)]
  firsts, moves, replicas = [], [], []
  for i, prompt in enumerate(prompts):
    source = 'ab'[i % 2]
    firsts.append(
      [
        backend.prefill(
          source,
          PrefillChunk(
            f'{i}',
            0,
            s,
            min(s + 16, len(prompt)),
            pages[i],
            prompt[s : s + 16],
            Sampling(),
          ),
        )
        for s in range(0, len(prompt), 16)
      ][-1]
    )
    replica = Replica(source, 4000 + i)
    replicas.append(replica)
    block = DevicePages(source, pages[i][:2])
    used = LAYOUT.pages_for(len(prompt))
    put = backend.transfer(ops_of(block, replica), 2, 1e9)
    handoff = ops_of(
      DevicePages(source, pages[i][2:used]), DevicePages('c', pages[i][2:used])
    )
    get = ops_of(replica, DevicePages('c', pages[i][:2]))
    moves += [put, backend.transfer(handoff, 1, 1e9)]
    moves.append(backend.transfer(get, 0, 1e9))
  for move in moves:
    assert desk.end_of(move).status == 'completed'
  tokens = [desk.end_of(work).token for work in firsts]
  got = [[token] for token in tokens]
  for half in (range(4), range(4, 8)):
    rows = [
      decode_row(f'{i}', tokens[i], len(prompts[i]), pages[i], 6) for i in half
    ]
    work = backend.decode('c', DecodeBatch(tuple(rows)), 6)
    desk.end_of(work)
    for i in half:
      got[i] += desk.tokens_of(work, f'{i}')
  assert got == expected
  backend.drop(tuple(replicas))


def test_drawn_tokens_do_not_depend_on_the_batch(desk):
  tokens, pages = random_tokens(10, seed=11), tuple(range(1, 10))
  first = desk.prefill('a', tokens, pages)
  drawn = Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5, logprobs=2)
  row = decode_row('r', first, 10, pages, 8, sampling=drawn)
  other = decode_row('s', 3, 0, range(20, 25), 8)
  alone = desk.backend.decode('a', DecodeBatch((row,)), 8)
  desk.end_of(alone)
  together = desk.backend.decode('a', DecodeBatch((other, row)), 8)
  desk.end_of(together)
  assert desk.tokens_of(alone) == desk.tokens_of(together)
  for completion in desk.completions[together]:
    for row in (row for step in completion.steps for row in step.rows):
      asked = row.request_id == 'r'
      assert [len(found.top) for found in row.logprobs] == [2] * asked
      assert all(found.logprob <= 0 for found in row.logprobs)


def test_wait_returns_at_until_s_on_wake_and_when_nothing_is_under_way(desk):
  backend = desk.backend
  assert backend.wait(None) == []
  until_s = backend.now_s() + 0.05
  assert backend.wait(until_s) == []
  assert backend.now_s() >= until_s
  backend.wake()
  assert backend.wait(backend.now_s() + 60) == []
  threading.Timer(0.05, backend.wake).start()
  start_s = time.perf_counter()
  assert backend.wait(backend.now_s() + 60) == []
  assert time.perf_counter() - start_s < 30
