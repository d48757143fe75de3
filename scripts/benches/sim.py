# SPDX-License-Identifier: Apache-2.0
"""How fast the simulator is, how it grows, and what memory it takes.

The published conversation trace on the paper's instances, `cost_based`, with
the trace's own blocks of 512 tokens and without a journal. Each case is a
process of its own (`sim_case.py`); its seconds are those of the serve loop.
"""

from collections.abc import Iterator
import json
import os
import subprocess
import sys
from typing import Any

from scripts.benches.rows import Row

RUN = 'configs/run/sim_published_conversation.gin'
RULES = (
  "ConductorSpec.policy='cost_based'",
  'ClusterSpec.block_size_tokens=512',
  'ClusterSpec.page_tokens=512',
)
CASE_S = 7200.0  # three times what the largest takes
REQUESTS = 12_031  # of the trace, which lasts 59 minutes
LARGE = 1000  # instances of each role
LARGE_SPEED = 100  # times the trace's rate
# All of the large case is served where this is set: 1.2 million requests.
WHOLE = 'MOONCAKE_JAX_WHOLE'


def sim(quick: bool) -> Iterator[Row]:
  """Speed, growth and memory of 8 + 8; speed and memory of 1000 + 1000."""
  once = _case(*_first(2000 if quick else REQUESTS))
  yield from _speed('sim.8p8d', once)
  for times in (2,) if quick else (2, 4):
    more = _case(*_first(1000 if quick else REQUESTS), _bind('repeats', times))
    yield from _growth(times, once, more)
  yield from _large(quick)


def _speed(name: str, case: dict[str, Any]) -> Iterator[Row]:
  count = case['requests']
  about = f'{count} requests, {case["completed"]} completed'
  yield Row(
    f'{name}.requests_per_s', count / case['wall_s'], '1/s', about, 5000
  )
  yield Row(f'{name}.requests_per_cpu_s', count / case['cpu_s'], '1/s', about)
  share = case['conductor_s'] / case['wall_s']
  yield Row(f'{name}.conductor_share', share, 'ratio', 'place and observe')
  yield _memory(name, case, 1.0)


def _memory(
  name: str, case: dict[str, Any], most_gib: float | None = None
) -> Row:
  gib = case['peak_bytes'] / 2**30
  about = 'of the whole process, trace included'
  return Row(f'{name}.peak_memory', gib, 'GiB', about, most_gib, at_most=True)


def _growth(
  times: int, once: dict[str, Any], more: dict[str, Any]
) -> Iterator[Row]:
  """Seconds a request of the longer trace over those of the shorter."""
  ratio = _request_s(more) / _request_s(once)
  about = f'seconds a request, {more["requests"]} over {once["requests"]}'
  yield Row(
    f'sim.8p8d.growth.x{times}', ratio, 'ratio', about, 1.25, at_most=True
  )


def _large(quick: bool) -> Iterator[Row]:
  whole = bool(os.environ.get(WHOLE))
  case = _case(
    *_first(2000 if quick else REQUESTS),
    f'ClusterSpec.prefill_instances={LARGE}',
    f'ClusterSpec.decode_instances={LARGE}',
    _bind('time_scale', LARGE_SPEED),
    _bind('repeats', LARGE_SPEED if whole else 1),
  )
  name = f'sim.{LARGE}p{LARGE}d'
  count = REQUESTS * LARGE_SPEED
  minutes = count * case['wall_s'] / case['requests'] / 60
  cpu_minutes = count * _request_s(case) / 60
  about = f'{case["requests"]} requests took {case["wall_s"]:.0f} s'
  if not whole:
    about += f', times {count / case["requests"]:.0f}'
  yield Row(f'{name}.hour', minutes, 'min', about, 30.0, at_most=True)
  yield Row(f'{name}.hour_cpu', cpu_minutes, 'min', 'seconds of the processor')
  yield _memory(name, case)


def _request_s(case: dict[str, Any]) -> float:
  return case['cpu_s'] / case['requests']


def _first(count: int) -> tuple[str, ...]:
  return (_bind('num_requests', count),)


def _bind(name: str, value: int) -> str:
  return f'TraceScale.{name}={value}'


def _case(*bindings: str) -> dict[str, Any]:
  """What the simulation measured of itself; one core, no jax."""
  command = [sys.executable, '-m', 'scripts.benches.sim_case', RUN]
  done = subprocess.run(
    [*command, *RULES, *bindings],
    check=True,
    capture_output=True,
    text=True,
    timeout=CASE_S,
  )
  return json.loads(done.stdout.splitlines()[-1])
