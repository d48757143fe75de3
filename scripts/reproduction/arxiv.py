# SPDX-License-Identifier: Apache-2.0
"""arXiv figure 8: TTFT by policy on a workload of the arXiv trace's kind."""

from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import Runs

# Mean TTFT in seconds, printed.
PAPER = {
  'kvcache_centric': 6.26,
  'cache_aware': 14.36,
  'load_balancing': 60.41,
  'random': 92.07,
}


def arxiv(runs: Runs) -> Section:
  found = {
    run.values['ConductorSpec.policy']: run.figures
    for run in runs.sweep('arxiv')
  }
  rows = [
    (
      f'`{policy}`',
      paper,
      found[policy]['ttft_s.mean'],
      ' / '.join(f'{s:.1f}' for s in found[policy]['ttft_box']),
      found[policy]['hit_rate'],
    )
    for policy, paper in PAPER.items()
  ]
  means = [found[policy]['ttft_s.mean'] for policy in PAPER]
  return Section(
    'Scheduling policies (arXiv figure 8)',
    [
      'The arXiv trace is not public: half an hour of generated tool & agent '
      'requests (the same service; mean input 8,596 tokens instead of 7,590) '
      'on 8 + 8 nodes. So only the order is asked for. TTFT in seconds.',
      table(
        ('policy', 'mean, paper', 'mean', 'box', 'hit rate'),
        rows,
      ),
    ],
    checks={'the order of the four policies': means == sorted(means)},
  )
