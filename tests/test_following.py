# SPDX-License-Identifier: Apache-2.0
"""Works that follow others layer by layer, on the virtual clock."""

from dataclasses import replace

import hypothesis
from hypothesis import strategies as st
import pytest

from lifecycle import COSTS
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.costs.pipeline import even_makespan_s
from mooncake_jax.costs.pipeline import stage_spans
from mooncake_jax.sim.virtual import VirtualBackend

NUM_LAYERS = 20
# 1 ms a token, 1 GB/s and no latency: closed forms are short.
EVEN = replace(
  COSTS,
  prefill_base_s=0.0,
  prefill_s_per_prefix_token=0.0,
  prefill_s_per_token=1e-3,
  prefill_s_per_token_squared=0.0,
  handoff_latency_s=0.0,
  onload_latency_s=0.0,
  offload_latency_s=0.0,
)
CHUNK_S = 0.1  # of 100 tokens


def chunk(i=0, tokens=100):
  return PrefillChunk('r', 0, tokens * i, tokens * (i + 1), (1,))


def handoff(seconds, per_op=2, src='p'):
  """All layers from prefill to decode, `per_op` layers an op."""
  return _ops(DevicePages(src, (1,)), DevicePages('d', (1,)), seconds, per_op)


def fetch(seconds, per_op=2):
  return _ops(Replica('p', 1), DevicePages('p', (1,)), seconds, per_op)


def put(seconds, per_op=2):
  return _ops(DevicePages('p', (1,)), Replica('p', 1), seconds, per_op)


def _ops(src, dst, seconds, per_op):
  size = round(seconds * 1e9 * per_op / NUM_LAYERS)
  return tuple(
    TransferOp(src, dst, first, first + per_op, size)
    for first in range(0, NUM_LAYERS, per_op)
  )


def make(stage_layers=(NUM_LAYERS,), costs=EVEN, **kwargs):
  return VirtualBackend(costs, stage_layers, **kwargs)


def drain(backend):
  ends = {}
  while completions := backend.wait(None):
    for end in completions:
      assert end.work_id not in ends
      ends[end.work_id] = end
  return ends


def first_fails(end):
  return replace(end, status='failed') if end.work_id == 0 else end


@pytest.mark.parametrize('stages', [1, 2, 4, 5])
@pytest.mark.parametrize('num_chunks', [1, 3, 16])
def test_a_pipeline_fills_and_drains_in_closed_form(stages, num_chunks):
  backend = make((NUM_LAYERS // stages,) * stages)
  for i in range(num_chunks):
    backend.prefill('p', chunk(i))
  last_s = max(end.time_s for end in drain(backend).values())
  assert last_s == pytest.approx(even_makespan_s(num_chunks, stages, CHUNK_S))


@hypothesis.given(
  st.lists(st.integers(1, 300), min_size=1, max_size=6),
  st.sampled_from([(20,), (1, 19), (7, 6, 7), (19, 1)]),
  st.sampled_from([0.0, 0.02]),
)
def test_uneven_chunks_and_stages_follow_the_recurrence(
  sizes, stage_layers, boundary_s
):
  backend = make(stage_layers, boundary_s=boundary_s)
  works = [backend.prefill('p', chunk(0, size)) for size in sizes]
  ends = drain(backend)
  spans = stage_spans([s / 1000 for s in sizes], stage_layers, boundary_s)
  ours = [span for work in works for span in ends[work].spans]
  assert ours == [pytest.approx((s.start_s, s.stop_s)) for s in spans]


@pytest.mark.parametrize('ratio', [0.5, 1.0, 3.0])
@pytest.mark.parametrize('per_op', [1, 2, 20])
def test_what_one_chunk_computes_leaves_layer_by_layer(ratio, per_op):
  """Exposed: the last op, or all but what the first op could overlap."""
  backend = make()
  work = backend.prefill('p', chunk())
  move = backend.transfer(handoff(ratio * CHUNK_S, per_op), 1, 9.0, (work,))
  exposed_s = drain(backend)[move].time_s - CHUNK_S
  ops = NUM_LAYERS // per_op
  fast = ratio * CHUNK_S / ops
  slow = CHUNK_S / ops + ratio * CHUNK_S - CHUNK_S
  assert exposed_s == pytest.approx(max(fast, slow))


@pytest.mark.parametrize('stages', [1, 2])
def test_sixteen_chunks_hide_a_transfer_of_half_their_seconds(stages):
  backend = make((NUM_LAYERS // stages,) * stages)
  works, moves = [backend.prefill('p', chunk())], []
  for i in range(16):
    moves.append(backend.transfer(handoff(CHUNK_S / 2), 1, 99.0, (works[i],)))
    works.append(backend.prefill('p', chunk(), (works[i],)))
  ends = drain(backend)
  exposed_s = max(ends[m].time_s for m in moves) - ends[works[15]].time_s
  assert exposed_s == pytest.approx(CHUNK_S / 20)  # the last op
  assert exposed_s <= 0.15 * 16 * CHUNK_S / 2


@pytest.mark.parametrize('ratio', [0.5, 1.0, 3.0])
@pytest.mark.parametrize('stage_layers', [(20,), (4, 16)])
def test_a_chunk_computes_while_its_prefix_arrives(ratio, stage_layers):
  """It waits for the first op, or ends a last op's layers after the last."""
  backend = make(stage_layers)
  backend.transfer(put(0.0), 1, 9.0)
  drain(backend)
  move = backend.transfer(fetch(ratio * CHUNK_S), 0, 9.0)
  work = backend.prefill('p', chunk(), (move,))
  end = drain(backend)[work]
  waits = ratio * CHUNK_S / 10 + CHUNK_S
  last = ratio * CHUNK_S + CHUNK_S / 10
  assert end.time_s == pytest.approx(max(waits, last))
  assert end.started_s == pytest.approx(ratio * CHUNK_S / 10)


def test_a_prefix_is_handed_on_as_it_arrives():
  backend = make()
  backend.transfer(put(0.0), 1, 9.0)
  drain(backend)
  move = backend.transfer(fetch(0.2), 0, 9.0)
  on = backend.transfer(handoff(0.1), 1, 9.0, (move,))
  assert drain(backend)[on].time_s == pytest.approx(0.21)


def test_who_waits_for_layers_leaves_the_link_to_others():
  backend = make()
  work = backend.prefill('p', chunk())
  waits = backend.transfer(handoff(0.05), 1, 9.0, (work,))
  ready = backend.transfer(handoff(0.04), 1, 9.0)
  ends = drain(backend)
  assert ends[ready].time_s == pytest.approx(0.04)
  assert ends[waits].time_s == pytest.approx(CHUNK_S + 0.005)


def test_the_time_until_it_may_start_is_not_held_against_it():
  """0.1 s of chunk, then 0.04 s: late by a deadline in 0.03 s, not in 0.05."""
  for deadline_s, status in ((0.03, 'timeout'), (0.05, 'completed')):
    backend = make()
    work = backend.prefill('p', chunk())
    ops = handoff(0.04, per_op=NUM_LAYERS)
    move = backend.transfer(ops, 1, deadline_s, (work,))
    end = drain(backend)[move]
    assert end.status == status
    assert end.time_s == pytest.approx(CHUNK_S + min(deadline_s, 0.04))


def test_a_failure_takes_along_what_follows_and_nothing_else():
  backend = make(
    spoil=lambda c: replace(c, status='failed') if not c.work_id else c
  )
  works = [backend.prefill('p', chunk(0))]
  works.append(backend.prefill('p', chunk(1), (works[0],)))
  works.append(backend.transfer(handoff(0.1), 1, 9.0, (works[1],)))
  other = backend.prefill('p', chunk())
  ends = drain(backend)
  assert [ends[w].status for w in works] == ['failed'] * 3
  assert (
    ends[works[2]].error == f'it follows work {works[1]}, which ended as failed'
  )
  assert list(ends) == [*works, other]
  # What would have run gives back its time at once.
  assert ends[other].time_s == pytest.approx(2 * CHUNK_S)


def test_what_failed_with_one_work_is_not_started_by_another():
  backend = make(spoil=first_fails)
  bad = backend.prefill('p', chunk())
  good = backend.prefill('p', chunk(), ())
  move = backend.transfer(handoff(0.01), 1, 9.0, (bad, good))
  last = backend.transfer(handoff(0.01), 1, 9.0, (move,))
  ends = drain(backend)
  assert [ends[w].status for w in (bad, good, move, last)] == [
    'failed',
    'completed',
    'failed',
    'failed',
  ]


def test_a_chunk_whose_prefix_times_out_lets_the_next_run_at_once():
  backend = make((10, 10))
  move = backend.transfer(fetch(50.0), 0, 7.0)
  work = backend.prefill('p', chunk(), (move,))
  other = backend.prefill('p', chunk())
  ends = drain(backend)
  assert (ends[move].status, ends[work].status) == ('timeout', 'failed')
  assert ends[other].time_s == pytest.approx(7 + CHUNK_S)


def test_an_ended_work_counts_as_what_it_ended_as():
  backend = make(
    spoil=lambda c: replace(c, status='failed') if not c.work_id else c
  )
  bad, good = backend.prefill('p', chunk()), backend.prefill('q', chunk())
  assert len(backend.wait(None)) == 2
  followers = [backend.prefill('p', chunk(), (work,)) for work in (bad, good)]
  ends = drain(backend)
  assert [ends[w].status for w in followers] == ['failed', 'completed']


def test_what_has_not_begun_is_cancelled_at_once():
  backend = make()
  works = [backend.prefill('p', chunk())]
  works.append(backend.prefill('p', chunk(1), (works[0],)))
  works.append(backend.transfer(handoff(0.1), 1, 9.0, (works[1],)))
  assert not backend.wait(0.01)
  for work in works[:2]:
    backend.cancel(work)
  ends = drain(backend)
  assert [ends[w].status for w in works] == ['completed', 'cancelled', 'failed']
  assert [ends[w].time_s for w in works] == pytest.approx([CHUNK_S, 0.01, 0.01])


KINDS = st.sampled_from(['chunk p', 'chunk q', 'handoff', 'put', 'fetch'])


def test_a_chunk_that_fails_at_the_head_of_a_queue_lets_the_next_go_on():
  """Its turn came only once something else happened, which may be never."""
  backend = make()
  missing = backend.transfer(fetch(0.0), 1, 1.0)
  first = backend.prefill('q', chunk(), (missing,))
  second = backend.prefill('q', chunk())
  ends = drain(backend)
  assert ends[missing].status == ends[first].status == 'failed'
  assert ends[second].status == 'completed'
  assert ends[second].time_s == pytest.approx(CHUNK_S)


@hypothesis.settings(max_examples=50)
@hypothesis.given(
  st.lists(
    st.tuples(
      KINDS,
      st.lists(st.integers(1, 6), max_size=2),
      st.floats(0, 0.3),
      st.sampled_from(['', '', '', 'failed', 'cancelled']),
      st.floats(0, 0.1),
    ),
    min_size=1,
    max_size=14,
  ),
  st.sampled_from([(20,), (10, 10), (1, 2, 17)]),
)
def test_any_works_end_after_what_they_follow_and_only_if_that_did(
  plan, stage_layers
):
  """Whatever follows what, fails or is cancelled, at whatever time."""
  bad: dict[int, str] = {}
  backend = make(
    stage_layers,
    spoil=lambda c: replace(c, status=bad.get(c.work_id, c.status)),
  )
  works, after, ends = [], {}, {}

  def note(completions):
    for end in completions:
      assert end.work_id not in ends
      ends[end.work_id] = end

  for kind, back, seconds, fate, pause_s in plan:
    ids = tuple(works[-b] for b in back if b <= len(works))
    # One whose failure is known is not named.
    ids = tuple(
      i for i in ids if i not in ends or ends[i].status == 'completed'
    )
    if kind.startswith('chunk'):
      tokens = round(seconds * 1000) + 1
      work = backend.prefill(kind[-1], chunk(0, tokens), ids)
    else:
      ops = {'handoff': handoff, 'put': put, 'fetch': fetch}[kind](seconds)
      work = backend.transfer(ops, 1, backend.now_s() + 0.2, ids)
    if fate:
      bad[work] = fate
    works.append(work)
    after[work] = ids
    note(backend.wait(backend.now_s() + pause_s))
    if fate == 'cancelled':
      backend.cancel(work)
  note(list(drain(backend).values()))
  assert set(ends) == set(works)
  order = list(ends)
  for work, ids in after.items():
    for ahead in ids:
      if ends[work].status == 'completed':
        assert ends[ahead].status == 'completed'
        assert order.index(ahead) < order.index(work)
        assert ends[ahead].time_s <= ends[work].time_s
