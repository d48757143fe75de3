# SPDX-License-Identifier: Apache-2.0
"""FAST'25 figure 5: TTFT by prefill policy, on the conversation trace."""

from scripts.reproduction.page import deviation
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import Runs

# Mean (printed); quartiles and upper whisker (read off the figure).
PAPER = {
  'kvcache_centric': (3.07, 0.39, 1.72, 4.14, 9.8),
  'cache_aware': (3.58, 0.56, 2.16, 5.14, 12.0),
  'load_balancing': (5.27, 1.05, 3.56, 7.41, 16.9),
  'random': (19.65, 3.54, 13.7, 29.3, None),
}


def policies(runs: Runs) -> Section:
  found = {
    run.values['ConductorSpec.policy']: run.figures
    for run in runs.sweep('policies')
  }
  rows = []
  for policy, figures in found.items():
    paper, mean_s = PAPER.get(policy), figures['ttft_s.mean']
    box = ' / '.join(f'{s:.2f}' for s in figures['ttft_box'])
    paper_box = '-'
    if paper:
      paper_box = ' / '.join('-' if s is None else f'{s}' for s in paper[1:])
    rows.append(
      (
        f'`{policy}`',
        paper[0] if paper else None,
        mean_s,
        deviation(mean_s, paper[0] if paper else None),
        paper_box,
        box,
        figures['hit_rate'],
      )
    )
  means = [found[policy]['ttft_s.mean'] for policy in PAPER]
  return Section(
    "Scheduling policies (FAST'25 figure 5)",
    [
      '8 + 8 nodes, the whole conversation trace. TTFT in seconds: mean, then '
      "quartiles and upper whisker. The order is the paper's, the level is "
      'not: see *Why the conversation figures deviate*.',
      table(
        (
          'policy',
          'mean, paper',
          'mean',
          'deviation',
          'box, paper',
          'box',
          'hit rate',
        ),
        rows,
      ),
    ],
    checks={
      'KVCache-centric < cache-aware < load balancing < random': (
        means == sorted(means)
      ),
      'mean TTFTs within 15 %': all(
        abs(mean_s / paper[0] - 1) <= 0.15
        for mean_s, paper in zip(means, PAPER.values())
      ),
    },
  )
