# SPDX-License-Identifier: Apache-2.0
"""arXiv table 1: hit rate of one pool by eviction policy and capacity."""

from functools import partial

from mooncake_jax.store.eviction import POLICIES
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import QUICK_REQUESTS
from scripts.reproduction.runs import Runs
from scripts.reproduction.workloads import paper_rows
from scripts.trace_hits import exact

BLOCKS = (100_000, 50_000, 30_000, 10_000, 1_000)
# Printed, at BLOCKS of 512 tokens.
PAPER = {
  'lru': (0.51, 0.50, 0.48, 0.40, 0.30),
  'lfu': (0.51, 0.49, 0.43, 0.35, 0.30),
  'length_aware': (0.50, 0.48, 0.42, 0.35, 0.30),
}


def evictions(runs: Runs) -> Section:
  found = {
    policy: runs.keep(f'eviction_{policy}', partial(_hits, policy, runs.quick))[
      'by_token'
    ]
    for policy in PAPER
  }
  rows = []
  for policy, paper in PAPER.items():
    rows.append((f'`{policy}`, paper', *paper))
    rows.append((f'`{policy}`', *found[policy]))
  middle = range(1, len(BLOCKS) - 1)
  return Section(
    'Eviction policies (arXiv table 1)',
    [
      'One pool, requests one after another, hit rate by token; capacities in '
      'blocks of 512 tokens. Their trace is not public: 23,608 generated tool '
      '& agent requests.',
      table(('policy', *map(str, BLOCKS)), rows),
    ],
    checks={
      'LRU is best between 10,000 and 50,000 blocks': all(
        found['lru'][i] >= max(found['lfu'][i], found['length_aware'][i])
        for i in middle
      )
    },
  )


def _hits(policy: str, quick: bool) -> dict[str, list[float]]:
  rows = paper_rows('tool_agent').rows
  if quick:
    rows = rows[:QUICK_REQUESTS]
  return {
    'by_token': [
      exact(rows, blocks, POLICIES[policy](blocks)).by_token
      for blocks in BLOCKS
    ]
  }
