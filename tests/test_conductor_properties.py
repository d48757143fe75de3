# SPDX-License-Identifier: Apache-2.0
"""What holds of any Conductor, whatever it is asked and told."""

import copy
from dataclasses import replace
from typing import get_args

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from lifecycle import make_conductor
from lifecycle import make_request
from lifecycle import SPEC
from mooncake_jax.cluster_spec import Reserve
from mooncake_jax.conductor.admission import ADMISSIONS
from mooncake_jax.conductor.policies import POLICIES
from mooncake_jax.conductor.telemetry import Telemetry
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import TokensEmitted
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import TokenSegment
from mooncake_jax.slo import SLO

# A request: (head, its length, tail length, output, seconds since the last).
asked = st.tuples(
  st.integers(0, 1),
  st.integers(0, 40),
  st.integers(1, 60),
  st.integers(1, 40),
  st.floats(0, 0.05),
)
rules = st.fixed_dictionaries(
  {
    'policy': st.sampled_from(sorted(POLICIES)),
    'admission': st.sampled_from(sorted(ADMISSIONS)),
    'correct': st.booleans(),
    'telemetry': st.builds(
      Telemetry, st.sampled_from((0.0, 0.02)), st.sampled_from((0.0, 0.3))
    ),
  }
)
TIGHT = SLO(ttft_s=0.05, tbt_s=0.0028)


def make(name, what, arrival_s):
  head, head_length, tail, output = what
  tokens = np.full(head_length, 2 + head)
  prompt = np.concatenate([tokens, 7 + np.arange(tail) % 50])
  return make_request(name, prompt, output, arrival_s)


def life(placed: Placement, output: int, now_s: float, ends):
  """The events of a placed request, up to its end."""
  key = placed.request_id, placed.attempt
  first_s = now_s + placed.ttft_s
  first = Emitted((key,), TokenSegment(first_s, 0, 1))
  events = [
    PrefixFetched(now_s, *key, placed.prefill, now_s),
    PrefillDone(first_s, *key, placed.prefill, now_s, 1, placed.prefill_s),
    TokensEmitted(first_s, placed.decode, first),
  ]
  last_s = first_s + 0.002 * output
  if output % 3 == 0:
    events.append(Preempted(first_s, *key, placed.decode))
  if ends is Finished:
    return [*events, Finished(last_s, *key, placed.decode, output)]
  return [*events[: len(str(key)) % 4], ends(last_s, *key, placed.prefill)]


@settings(max_examples=100, deadline=None)
@given(
  rules,
  st.lists(asked, max_size=25),
  st.randoms(use_true_random=False),
  st.sampled_from(get_args(Reserve)),
)
def test_what_is_reserved_never_exceeds_capacity_and_all_comes_back(
  chosen, requests, rng, reserve
):
  spec = replace(SPEC, decode_pool_tokens=128, decode_reserve=reserve)
  conductor = make_conductor(spec, slo=TIGHT, **chosen)
  view, now_s, ends = conductor.view, 0.0, []
  for i, (*what, since_s) in enumerate(requests):
    now_s += since_s
    request = make(f'r{i}', what, now_s)
    placed = conductor.place(request, now_s)
    if isinstance(placed, Placement):
      kind = rng.choice((Finished, Failed, Cancelled))
      ends += life(placed, what[-1], now_s, kind)
    ends.sort(key=lambda event: event.time_s)
    while ends and ends[0].time_s <= now_s:
      conductor.observe(ends.pop(0))
    view.check()
    assert (
      view.decode.reserved_tokens_I <= view.decode.capacity_tokens_I
    ).all()
  for event in ends:
    conductor.observe(event)
  view.pass_time(now_s + SPEC.request_timeout_s + 1.0)  # what was lost expires
  fresh = make_conductor().view
  view.check()
  assert not len(view.placed) + len(view.prefill) + len(view.decode)
  for name in ('rows_I', 'context_tokens_I', 'reserved_tokens_I'):
    found, first = getattr(view.decode, name), getattr(fresh.decode, name)
    assert (found == first).all(), name
  assert view.index.num_entries == 0


@settings(max_examples=40, deadline=None)
@given(rules, st.lists(asked, min_size=1, max_size=12))
def test_a_placement_is_a_pure_function_of_view_and_request(chosen, requests):
  """Asking leaves no trace, and equal views answer alike."""
  conductor = make_conductor(slo=TIGHT, **chosen)
  now_s = 0.0
  for i, (*what, since_s) in enumerate(requests):
    now_s += since_s
    request = make(f'r{i}', what, now_s)
    twin = copy.deepcopy(conductor)
    explained = conductor.explain(request, now_s).decision
    decided = conductor.place(request, now_s)
    assert explained == decided == twin.place(request, now_s)


@pytest.mark.parametrize('policy', sorted(POLICIES))
def test_equal_instances_share_equal_requests(policy):
  """Nothing herds: prompts that share nothing spread over idle instances."""
  conductor = make_conductor(policy=policy)
  places = [
    conductor.place(make(f'r{i}', (i % 2, 0, 30 + i, 5), 0.0), 10.0 * i)
    for i in range(60)
  ]
  names = [p.prefill for p in places if isinstance(p, Placement)]
  counts = np.unique(names, return_counts=True)[1]
  assert len(names) == 60
  assert len(counts) == 2 and counts.min() >= 10
