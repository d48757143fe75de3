# SPDX-License-Identifier: Apache-2.0
"""FAST'25 figure 9: hit rate of one LRU pool by its capacity.

Requests in their order, no time, no replicas: `scripts/trace_hits.py`, the
Master itself with exact eviction.
"""

from collections.abc import Sequence
from functools import partial

from mooncake_jax.report.lines import line_panels
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow
from scripts.reproduction.page import deviation
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import QUICK_REQUESTS
from scripts.reproduction.runs import Runs
from scripts.reproduction.workloads import Name
from scripts.reproduction.workloads import NAMES
from scripts.reproduction.workloads import paper_rows
from scripts.trace_hits import exact

TOKENS = (1e5, 1e6, 2e6, 4e6, 8e6, 1e7, 5e7, 1e9)
# Read off the figure, at TOKENS.
PAPER: dict[Name, tuple[float, ...]] = {
  'conversation': (0.073, 0.087, 0.120, 0.215, 0.300, 0.326, 0.398, 0.401),
  'tool_agent': (0.363, 0.387, 0.413, 0.484, 0.544, 0.561, 0.595, 0.595),
  'synthetic': (0.012, 0.146, 0.235, 0.380, 0.545, 0.589, 0.659, 0.659),
}


def hits(runs: Runs) -> Section:
  texts, panels = [], {}
  for name in NAMES:
    found = runs.keep(f'hits_{name}', partial(_hits, name, runs.quick))
    texts += [f'**{name}**', _table(name, found['by_token'], found)]
    panels[name] = {
      'paper': [*zip(TOKENS, PAPER[name])],
      'ours, by token': [*zip(TOKENS, found['by_token'])],
      'ours, mean of requests': [*zip(TOKENS, found['by_request'])],
    }
  return Section(
    "Hit rate by capacity (FAST'25 figure 9)",
    [
      'One LRU pool, requests one after another. By token is what a cache '
      "saves; the mean of requests' own ratios is the other reading of "
      "`hit rate`, and it is the nearer one on the conversation trace's "
      'maximum.',
      *texts,
      'On the public conversation trace exact LRU lies below the curve where '
      'the pool is small, whichever reading is taken; the same counting on '
      'the synthetic trace does not, so it is not the counting. Reused blocks '
      'of the public conversation trace lie further apart than the curve '
      'allows: at 4 M tokens an *optimal* choice of what to keep is asked for '
      'in LOG.md. The tool & agent rows are of the generator.',
    ],
    plots={'hits': line_panels(panels, 'tokens of capacity', 'hit rate')},
  )


def _table(name: Name, by_token: Sequence[float], found: dict) -> str:
  rows = [
    (f'{tokens:.0e}', paper, ours, deviation(ours, paper), mean)
    for tokens, paper, ours, mean in zip(
      TOKENS, PAPER[name], by_token, found['by_request']
    )
  ]
  columns = ('tokens', 'paper', 'by token', 'deviation', 'mean of requests')
  return table(columns, rows)


def _hits(name: Name, quick: bool) -> dict[str, list[float]]:
  rows: Sequence[TraceRow] = paper_rows(name).rows
  if quick:
    rows = rows[:QUICK_REQUESTS]
  found = [exact(rows, int(t) // TOKENS_PER_HASH_ID) for t in TOKENS]
  return {
    'by_token': [hit.by_token for hit in found],
    'by_request': [hit.by_request for hit in found],
  }
