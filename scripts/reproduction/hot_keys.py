# SPDX-License-Identifier: Apache-2.0
"""FAST'25 figure 11: on how many prefill nodes the hot keys lie."""

from mooncake_jax.report.lines import line_panels
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.replicas import EVERY_S
from scripts.reproduction.replicas import RANKS
from scripts.reproduction.runs import Runs

# Largest number, and mean of the last third, by workload and rank.
PAPER = {
  'conversation': ((8, 8.0), (7, 6.9), (6, 0.7), (3, 0.0)),
  'tool_agent': ((8, 7.9), (7, 7.0), (5, 1.6), (3, 0.0)),
  'synthetic': ((5, 4.4), (4, 4.0), (5, 4.9), (2, 1.0)),
}


def replica_counts(runs: Runs) -> Section:
  rows, panels = [], {}
  for run in runs.sweep('workloads'):
    name, held = run.values['paper_rows.name'], run.figures['replicas']
    for rank, paper in zip(RANKS, PAPER[name]):
      counts = held.get(str(rank), [])
      last = counts[-max(len(counts) // 3, 1) :]
      ours = (max(counts), f'{sum(last) / len(last):.1f}') if counts else ()
      rows.append((name, f'{rank}', *map(str, paper), *map(str, ours)))
    panels[name] = {
      f'rank {rank}': [(i * EVERY_S / 60, n) for i, n in enumerate(counts)]
      for rank, counts in held.items()
    }
  return Section(
    "Replicas of hot keys (FAST'25 figure 11)",
    [
      '8 prefill nodes, sampled every 30 s. Keys are ranked by how many '
      'requests have them. Copies are made by Algorithm 1 alone, as a side '
      'effect of fetching; blocks here have 256 tokens, so a rank is another '
      "block than in a count of the trace's 512-token ids.",
      table(
        (
          'workload',
          'rank',
          'most, paper',
          'last third, paper',
          'most',
          'last third',
        ),
        rows,
      ),
    ],
    plots={'replicas': line_panels(panels, 'minutes', 'prefill nodes')},
  )
