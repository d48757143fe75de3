# SPDX-License-Identifier: Apache-2.0
"""Links in virtual time: max-min fair shares, and what follows from them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from lifecycle import COSTS
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.sim.virtual import VirtualBackend

# 1 GB/s on every link and no latency, so a megabyte alone takes 1 ms.
EVEN = replace(
  COSTS,
  handoff_latency_s=0.0,
  onload_latency_s=0.0,
  offload_latency_s=0.0,
  copy_latency_s=0.0,
  copy_bytes_per_s=1e9,
  prefill_base_s=0.0,
  prefill_s_per_prefix_token=0.0,
  prefill_s_per_token=1e-3,
  prefill_s_per_token_squared=0.0,
)
MB = 10**6


def handoff(src: str, dst: str, num_bytes: int) -> TransferOp:
  places = DevicePages(src, (1,)), DevicePages(dst, (1,))
  return TransferOp(*places, 0, 2, num_bytes)


def ends_ms(flows, backend: VirtualBackend | None = None) -> list[float]:
  """When each of (src, dst, MB, begun ms[, priority]) ends, in ms."""
  backend = backend or VirtualBackend(EVEN, (2,))
  works, ends = [], {}
  for src, dst, megabytes, begun_ms, *priority in sorted(
    flows, key=lambda f: f[3]
  ):
    while backend.now_s() < begun_ms / 1e3:
      ends |= {c.work_id: c.time_s for c in backend.wait(begun_ms / 1e3)}
    op = handoff(src, dst, round(megabytes * MB))
    number = priority[0] if priority else 1
    works.append(backend.transfer((op,), number, 1e6))
  while completions := backend.wait(None):
    ends |= {c.work_id: c.time_s for c in completions}
  return [1e3 * ends[work] for work in works]


def test_one_flow_has_its_latency_and_the_whole_link():
  backend = VirtualBackend(COSTS, (2,))
  backend.transfer((handoff('p', 'd', MB),), 1, 9.0)
  (end,) = backend.wait(None)
  assert end.time_s == pytest.approx(COSTS.transfer_s(MB, 'handoff'))


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0, 1))
def test_two_flows_share_a_link(short_mb, more_mb, share):
  """The shorter has half; then the longer has all. Whoever comes late too."""
  flows = [('p', 'd', short_mb, 0), ('p', 'd', short_mb + more_mb, 0)]
  short, total = short_mb, 2 * short_mb + more_mb
  assert ends_ms(flows) == pytest.approx([2 * short, total])
  late_ms = share * short_mb
  flows = [('p', 'd', short_mb, 0), ('p', 'e', 100, late_ms)]
  first_ms = late_ms + 2 * (short_mb - late_ms)
  assert ends_ms(flows) == pytest.approx([first_ms, short_mb + 100])


def test_what_one_link_leaves_another_flow_takes():
  """Three leave p, so a third each; into d then q's flow finds two thirds."""
  flows = [('p', f, 30, 0) for f in ('b', 'c', 'd')] + [('q', 'd', 60, 0)]
  assert ends_ms(flows) == pytest.approx([90] * 4)


def test_both_directions_and_other_instances_are_not_in_the_way():
  flows = [('p', 'd', 5, 0), ('d', 'p', 7, 0), ('q', 'e', 9, 0)]
  assert ends_ms(flows) == pytest.approx([5, 7, 9])


def test_a_prefix_from_another_instance_and_a_handoff_share_its_network():
  backend = VirtualBackend(EVEN, (2,))
  here, there = DevicePages('p', (1,)), Replica('q', 1)
  backend.transfer((TransferOp(DevicePages('q', (1,)), there, 0, 2, 0),), 1, 9)
  backend.wait(None)
  backend.transfer((TransferOp(there, here, 0, 2, 5 * MB),), 1, 9.0)
  backend.transfer((handoff('q', 'd', 5 * MB),), 1, 9.0)
  backend.transfer((TransferOp(here, Replica('p', 2), 0, 2, 5 * MB),), 1, 9.0)
  ends = []
  while completions := backend.wait(None):
    ends += [(c.work_id, c.time_s) for c in completions]
  assert ends == [(3, 0.005), (1, 0.01), (2, 0.01)]


def _fair_rates(flows: list[tuple[str, str]]) -> list[float]:
  """By the definition: all rise alike, whoever meets a full port stops."""
  rates, step = [0.0] * len(flows), 1 / 420
  rising = set(range(len(flows)))
  while rising:
    for i in rising:
      rates[i] += step
    for side in (0, 1):
      for port in {flow[side] for flow in flows}:
        there = [i for i, flow in enumerate(flows) if flow[side] == port]
        if sum(rates[i] for i in there) > 1 - step / 2:
          rising -= set(there)
  return rates


@settings(max_examples=30, deadline=None)
@given(
  st.lists(
    st.tuples(st.sampled_from('pqr'), st.sampled_from('def')),
    min_size=1,
    max_size=4,
  )
)
def test_rates_are_max_min_fair(pairs):
  """The first to end does at its fair rate, and so the others' bytes say."""
  rates = _fair_rates(pairs)
  first_ms = 10 / max(rates)
  flows = [(*pair, 10, 0) for pair in pairs]
  # An endless flow tells how far each other one is by when it ends.
  assert min(ends_ms(flows)) == pytest.approx(first_ms, rel=1e-2)
  sizes = [10 * rate / max(rates) for rate in rates]
  even = [(*pair, size, 0) for pair, size in zip(pairs, sizes)]
  assert ends_ms(even) == pytest.approx([first_ms] * len(pairs), rel=2e-2)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 8))
def test_a_flow_stands_still_while_one_of_lower_priority_passes(
  first_mb, second_mb, quarters
):
  """The urgent one has the link from the moment it comes, the other the rest.

  So do any number of either: they share alike what their class has.
  """
  late_ms = quarters / 4 * second_mb
  wait_ms = first_mb if late_ms < second_mb else 0
  flows = [('p', 'd', second_mb, 0, 3), ('p', 'e', first_mb, late_ms, 0)]
  alone_ms = [second_mb + wait_ms, late_ms + first_mb]
  assert ends_ms(flows) == pytest.approx(alone_ms)
  split = [(s, d, mb / 2, ms, n) for s, d, mb, ms, n in flows for _ in range(2)]
  assert ends_ms(split) == pytest.approx(np.repeat(alone_ms, 2))


def test_a_flow_takes_what_those_before_it_leave():
  """Two urgent ones into d have half a link each: the other half of p's."""
  flows = [('p', 'd', 30, 0, 0), ('q', 'd', 30, 0, 0), ('p', 'e', 30, 0, 2)]
  assert ends_ms(flows) == pytest.approx([60, 60, 60])


def test_a_flow_that_others_hold_up_ends_at_its_deadline():
  backend = VirtualBackend(EVEN, (2,))
  backend.transfer((handoff('p', 'd', 50 * MB),), 2, 0.03)
  backend.transfer((handoff('p', 'd', 40 * MB),), 1, 9.0)
  (late,), (end,) = backend.wait(None), backend.wait(None)
  assert (late.status, late.time_s) == ('timeout', pytest.approx(0.03))
  assert (end.status, end.time_s) == ('completed', pytest.approx(0.04))


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.sampled_from('pqr'),
      st.sampled_from('de'),
      st.integers(1, 40),
      st.integers(0, 60),
      st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
  )
)
def test_a_port_moves_no_more_than_it_can_and_idles_only_without_flows(
  flows: list[tuple[str, str, int, int, int]],
):
  """Bytes of each source by the end of its last flow; the sole bottleneck."""
  flows = sorted(flows, key=lambda flow: flow[3])
  backend = VirtualBackend(EVEN, (2,))
  ends = ends_ms(flows, backend)
  for (what, whose), use in backend.link_uses().items():
    side = ('out', 'in').index(what)
    size = sum(f[2] for f in flows if f[side] == whose)
    assert use == pytest.approx((size * MB, size / 1e3))
  for side in (0, 1):
    for port in {flow[side] for flow in flows}:
      spans = [(f[3], e) for f, e in zip(flows, ends) if f[side] == port]
      size = sum(f[2] for f in flows if f[side] == port)
      assert size <= _covered(spans) + 1e-6
  assert all(e >= f[3] + f[2] - 1e-6 for f, e in zip(flows, ends))
  single = [(f[0], 'd', *f[2:]) for f in flows]
  spans = [*zip((f[3] for f in single), ends_ms(single))]
  assert _covered(spans) == pytest.approx(sum(f[2] for f in single))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
  """Length of the union of intervals."""
  times = sorted({t for span in spans for t in span})
  return sum(
    b - a
    for a, b in pairwise(times)
    if any(start <= a and b <= stop for start, stop in spans)
  )


def test_a_queue_of_equal_prompts_waits_as_an_m_d_1_queue():
  """Mean wait rho / (2 (1 - rho)) services: Pollaczek-Khinchine, no variance.

  From Poisson arrivals of a seeded generator; within 5 % of the mean.
  """
  service_s, load, count = 0.1, 0.7, 30_000
  rng = np.random.default_rng(3)
  arrivals_s = np.cumsum(rng.exponential(service_s / load, count))
  backend = VirtualBackend(EVEN, (1,))
  starts: dict[int, float] = {}
  for arrival_s in arrivals_s.tolist():
    while backend.now_s() < arrival_s:
      starts |= {c.work_id: c.started_s for c in backend.wait(arrival_s)}
    backend.prefill('p', PrefillChunk('r', 0, 0, 100, (1,)))
  while completions := backend.wait(None):
    starts |= {c.work_id: c.started_s for c in completions}
  waits_s = np.array([starts[i] for i in range(count)]) - arrivals_s
  expected_s = service_s * load / (2 * (1 - load))
  assert waits_s.mean() == pytest.approx(expected_s, rel=0.05)
