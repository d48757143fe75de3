# SPDX-License-Identifier: Apache-2.0
"""Hit rates of the published traces: exact, by default, and by policy."""

from collections.abc import Callable

from mooncake_jax.store.eviction import lfu
from mooncake_jax.store.eviction import lru
from mooncake_jax.store.eviction import POLICIES
from mooncake_jax.workload.trace import TraceRow
from scripts import trace_hits
from scripts.benches.rows import Row
from scripts.hit_table import CAPACITIES
from scripts.hit_table import published
from scripts.workloads import published as published_trace

TRACES = ('conversation', 'synthetic')
QUICK = (10_000, 1_000)
EXACT: dict[str, Callable[[list[TraceRow], int], trace_hits.Hits]] = {
  'lru': lambda rows, n: trace_hits.exact(rows, n, lru),
  'lfu': lambda rows, n: trace_hits.exact_block_by_block(rows, n, lfu),
}


def hits(quick: bool) -> list[Row]:
  """Distance from the published table, and what each policy finds."""
  rows = []
  capacities = QUICK if quick else CAPACITIES
  for trace in TRACES:
    requests = published_trace(f'{trace}_trace.jsonl').rows
    for policy in EXACT:
      rows += _distances(trace, requests, policy, capacities)
    for capacity in capacities[1:]:
      rows += _policies(trace, requests, capacity)
  return rows


def _distances(
  trace: str, rows: list[TraceRow], policy: str, capacities: tuple[int, ...]
) -> list[Row]:
  found = []
  for capacity in capacities:
    exact = EXACT[policy](rows, capacity)
    by_token, by_request = published(trace, policy, capacity)
    worst = max(
      abs(exact.by_token - by_token), abs(exact.by_request - by_request)
    )
    name = f'hits.{trace}.{policy}.{capacity}'
    found += [
      Row(f'{name}.by_token', exact.by_token, 'ratio', f'{by_token}'),
      Row(f'{name}.by_request', exact.by_request, 'ratio', f'{by_request}'),
      Row(f'{name}.distance', worst, 'ratio', target=0.005, at_most=True),
    ]
  return found


def _policies(trace: str, rows: list[TraceRow], capacity: int) -> list[Row]:
  return [
    Row(
      f'hits.{trace}.default.{name}.{capacity}.by_token',
      trace_hits.default(rows, capacity, make(capacity)).by_token,
      'ratio',
      'complete blocks, watermark 0.95, batches, leases of 10 s',
    )
    for name, make in POLICIES.items()
  ]
