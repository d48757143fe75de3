# SPDX-License-Identifier: Apache-2.0
"""Coupled instances: vLLM's rules on hand-made cases, and what always holds."""

from dataclasses import replace

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from cost_pieces import polynomial
from mooncake_jax.changes import Changes
from mooncake_jax.metrics.latency import intervals
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.request import Request
from mooncake_jax.systems.vllm import serve_vllm
from mooncake_jax.systems.vllm import VllmSpec
from mooncake_jax.workload.generate import distinct_prompts
from scripts.config import load
from scripts.experiment import Experiment
from scripts.serving import backends
from scripts.serving import prepare
from scripts.serving import serve_alone
from scripts.serving import serve_once
from scripts.workloads import TraceWorkload

BLOCK = 32
# 1 s a pass, 0.1 s a token of prompt, 0.5 s a decode step and 0.01 s a row.
COSTS = polynomial(
  prefill_base_s=1.0,
  prefill_s_per_prefix_token=0.0,
  prefill_s_per_token=0.1,
  prefill_s_per_token_squared=0.0,
  decode_base_s=0.5,
  decode_s_per_row=0.01,
  decode_s_per_context_token=0.0,
)
ONE = VllmSpec(instances=1, max_tokens=4096, pool_tokens=8192)


def request(name, at_s, prompt, output, chain=''):
  keys = tuple(f'{chain or name} {i}'.encode() for i in range(prompt // BLOCK))
  return Request(name, at_s, prompt, output, keys)


def serve(requests, **changes):
  return serve_vllm(requests, replace(ONE, **changes), COSTS, BLOCK)


def times(record):
  return [s.token_s(i) for s in record.segments for i in range(s.count)]


def test_prompts_go_first_and_decoding_waits_for_them():
  a, b = serve([request('a', 0.0, 10, 4), request('b', 2.6, 20, 2)])
  # a: a pass of 1 + 1 s, a step of 0.51 s, which ends at 2.51, one more until
  # 3.02; then b's pass of 3 s, and steps of 0.52 s.
  assert times(a) == pytest.approx([2.0, 2.51, 3.02, 6.54])
  assert times(b) == pytest.approx([6.02, 6.54])
  assert a.prefill_s == pytest.approx(2.0) and b.ttft_s == pytest.approx(3.42)


def test_short_prompts_share_a_pass_up_to_its_tokens():
  some = [request(f'r{i}', 0.0, 10, 1) for i in range(3)]
  assert [r.ttft_s for r in serve(some)] == pytest.approx([4.0] * 3)
  apart = serve(some, step_tokens=20)
  assert [r.ttft_s for r in apart] == pytest.approx([3.0, 3.0, 5.0])
  assert sum(r.prefill_s for r in apart) == pytest.approx(5.0)


def test_a_router_may_know_what_is_cached():
  """Both are idle: the one with the prompt's blocks, or the first one."""
  first = request('a', 0.0, 10 * BLOCK, 1, 'x')
  other = request('b', 0.1, 10 * BLOCK, 1, 'y')
  again = request('c', 100.0, 10 * BLOCK, 1, 'y')
  spec = {'instances': 2, 'prefix_caching': True}
  blind = serve([first, other, again], **spec)
  knowing = serve([first, other, again], **spec, routing='least_uncached')
  # The first one's pass is under way when the second one comes.
  assert [r.prefill for r in blind] == ['vllm0', 'vllm1', 'vllm0']
  assert [r.prefill for r in knowing] == ['vllm0', 'vllm1', 'vllm1']
  assert knowing[2].reused_tokens == {'local_device': 9 * BLOCK}
  with pytest.raises(ValueError, match="routing='best'"):
    serve([first], routing='best')


def test_whether_reuse_is_known_is_the_workloads():
  asked = replace(request('a', 0.0, 10, 1), reuse_known=False)
  (record,) = serve([asked])
  assert not record.reuse_known


def test_chunks_fill_a_step_that_decoding_rides_on():
  a, b = serve(
    [request('a', 0.0, 4, 5), request('b', 1.5, 10, 2)],
    chunked_prefill=True,
    step_tokens=6,
  )
  # a's pass ends at 1.4, a step at 1.91; then b's chunks of 5 and 5 tokens, a
  # row in each: 1 + 0.5 + 0.01 s.
  assert times(a) == pytest.approx([1.4, 1.91, 3.42, 4.93, 5.45])
  assert times(b) == pytest.approx([4.93, 5.45])


def test_a_second_prompt_computes_only_what_is_not_cached():
  prompts = [
    request('a', 0.0, 100, 1, 'same'),
    request('b', 50.0, 100, 1, 'same'),
    request('c', 99.0, 96, 1, 'same'),
  ]
  a, b, c = serve(prompts, prefix_caching=True)
  assert a.ttft_s == pytest.approx(11.0) and b.ttft_s == pytest.approx(1.4)
  # All of c is cached, but its last token must be computed.
  assert c.reused_tokens == {'local_device': 64}
  assert all(not r.reused_tokens for r in serve(prompts))


def test_the_least_recently_used_blocks_go_first():
  prompts = [request(n, 1e3 * i, 1920, 1) for i, n in enumerate('aba')]
  prompts = [
    replace(r, request_id=f'r{i}', block_keys=r.block_keys)
    for i, r in enumerate(prompts)
  ]
  small = {'pool_tokens': 4200, 'prefix_caching': True}
  assert serve(prompts, **small)[2].reused_tokens
  third = request('c', 1.5e3, 1920, 1)
  again = serve([*prompts[:2], third, replace(prompts[2])], **small)
  assert sum(again[3].reused_tokens.values()) < 1900


def test_requests_go_to_the_instance_with_least_to_prefill():
  some = [request(f'r{i}', 0.1 * i, 100 - i, 2) for i in range(4)]
  records = serve(some, instances=4)
  assert {r.prefill for r in records} == {f'vllm{i}' for i in range(4)}
  assert all(r.prefill == r.decode for r in records)


def test_who_finds_no_page_starts_anew():
  some = [request(f'r{i}', 0.0, 1500, 2000) for i in range(2)]
  old, young = serve(some, max_tokens=4000, pool_tokens=4100)
  assert not old.preemptions and young.preemptions
  assert (old.finished_s or 0.0) < (young.finished_s or 0.0)
  assert [r.num_output_tokens for r in (old, young)] == [2000, 2000]


def test_what_is_too_long_fails_and_bad_sizes_are_refused():
  (record,) = serve([request('a', 0.0, 4096, 1)])
  assert (record.outcome, record.reason) == ('failed', 'too long')
  with pytest.raises(ValueError, match='pool_tokens=4096'):
    VllmSpec(max_tokens=4096, pool_tokens=4096)
  # 62 whole pages, one of which is left free.
  with pytest.raises(ValueError, match='pool_tokens=1000'):
    VllmSpec(max_tokens=990, pool_tokens=1000)
  fits = VllmSpec(1, max_tokens=976, pool_tokens=1000)
  (record,) = serve_vllm([request('a', 0.0, 975, 1)], fits, COSTS, BLOCK)
  assert record.outcome == 'completed'
  with pytest.raises(ValueError, match='block_size_tokens=24'):
    serve_vllm([], ONE, COSTS, 24)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.floats(0, 60),
      st.integers(1, 600),
      st.integers(1, 60),
      st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
  ),
  st.booleans(),
  st.booleans(),
  st.sampled_from([1, 2]),
)
def test_every_token_comes_once_and_in_order(made, caching, chunked, instances):
  some = [
    request(f'r{i}', at_s, prompt, output, f'chain{chain}')
    for i, (at_s, prompt, output, chain) in enumerate(made)
  ]
  records = serve(
    some,
    instances=instances,
    prefix_caching=caching,
    chunked_prefill=chunked,
    max_tokens=700,
    pool_tokens=1100,
  )
  by_name = {r.request_id: r for r in some}
  for record in records:
    asked = by_name[record.request_id]
    assert record.outcome == 'completed'
    assert record.num_output_tokens == asked.max_output_tokens
    steps = np.diff(times(record))
    assert (steps > 0).all() and record.first_token_s == times(record)[0]
    assert record.finished_s == pytest.approx(times(record)[-1])
    assert intervals(record.segments).counts.sum() == len(steps)
    assert record.prefill_s > 0
  if not any(record.preemptions for record in records):
    left = sum(
      record.prompt_tokens - sum(record.reused_tokens.values())
      for record in records
    )
    in_passes_s = sum(record.prefill_s for record in records) - 0.1 * left
    # What is left are the passes themselves, a second each.
    assert round(in_passes_s) >= 1
    assert in_passes_s == pytest.approx(round(in_passes_s))


def test_a_lone_request_is_served_as_by_a_colocated_pair():
  experiment, _ = load('configs/run/sim_conversation.gin', (), Experiment)
  pairs = replace(
    experiment.cluster,
    prefill_instances=2,
    decode_instances=2,
    colocated=True,
    streaming='chunks',
    chunk_tokens=512,
    reuse=False,
  )
  apart = distinct_prompts(3000, count=3, interval_s=100.0, output_tokens=40)
  experiment = replace(experiment, cluster=pairs, workload=TraceWorkload(apart))
  config = experiment.model.read_config()
  prepared = prepare(experiment, config)
  chunked = VllmSpec(instances=2, chunked_prefill=True)
  with backends(experiment, config) as make_backend:
    pair, ours = (
      serve_once(replace(experiment, vllm=spec), config, prepared, backend)
      for spec, backend in ((None, make_backend()), (chunked, make_backend()))
    )
  for a, b in zip(pair.records, ours.records, strict=True):
    assert b.ttft_s == pytest.approx(a.ttft_s)
    assert b.prefill_s == pytest.approx(a.prefill_s)
    assert tbt_tail_s(b) == pytest.approx(tbt_tail_s(a))
    assert b.finished_s == pytest.approx(a.finished_s)
  cancels = replace(experiment, vllm=chunked, changes=Changes(cancel_share=1.0))
  with pytest.raises(ValueError, match='cancel_share=1.0'):
    serve_alone(cancels)  # coupled instances know no cancels
