# SPDX-License-Identifier: Apache-2.0
"""Two blind predictions: by network bandwidth, and by the P:D split.

Computed before the paper's numbers were looked up, and published as computed.
"""

from collections.abc import Mapping
from typing import Any

from mooncake_jax.report.lines import line_panels
from scripts.reproduction.page import percent
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import Found
from scripts.reproduction.runs import Runs

NODES = 16
PREFILL = range(5, 12)
WAYS = {
  'Algorithm 1': (),
  'cost_based': ("ConductorSpec.policy='cost_based'",),
  'recompute': ('ClusterSpec.reuse=False',),
}


def bandwidth(runs: Runs) -> Section:
  found = {way: runs.sweep('bandwidth', bind) for way, bind in WAYS.items()}
  gbps = [_gbps(run) for run in found['recompute']]
  columns = ('mean TTFT in s', *(f'{x:g} Gbps' for x in gbps))
  rows = [
    (way, *(run.figures['ttft_s.mean'] for run in some))
    for way, some in found.items()
  ]
  lines = {
    way: [(_gbps(run), run.figures['ttft_s.mean']) for run in some]
    for way, some in found.items()
  }
  return Section(
    'Blind: TTFT by network bandwidth',
    [
      'The synthetic trace on 8 + 8 nodes; all that leaves a node (prefixes '
      'for others, KVCache for decode) shares so much. Algorithm 1 as printed '
      'always fetches where another has far more of the prefix; `cost_based` '
      'fetches only where that is sooner; recompute reuses nothing at all.',
      table(columns, rows),
    ],
    plots={
      'bandwidth': line_panels(
        {'synthetic': lines}, 'Gbps', 'mean TTFT, s', log_y=True
      )
    },
  )


def _gbps(run: Found) -> float:
  return run.values['nic_bytes_per_s'] * 8 / 1e9


def split(runs: Runs) -> Section:
  found: dict[str, dict[int, Mapping[str, Any]]] = {}
  for prefill in PREFILL:
    bind = (
      f'ClusterSpec.prefill_instances={prefill}',
      f'ClusterSpec.decode_instances={NODES - prefill}',
    )
    for run in runs.sweep('split', bind):
      name = run.values['paper_rows.name']
      found.setdefault(name, {})[prefill] = run.figures
  panels = {}
  texts = []
  for name, by_split in found.items():
    rows = [
      (
        f'{prefill}P{NODES - prefill}D',
        f'{percent(figures["effective_request_capacity"])} %',
        figures['ttft_s.mean'],
        figures['ttft_s.p90'],
        1e3 * figures['tbt_s.mean'],
        1e3 * figures['tbt_tail_s.mean'],
      )
      for prefill, figures in by_split.items()
    ]
    columns = (
      'split',
      'effective',
      'mean TTFT, s',
      'P90 TTFT, s',
      'mean TBT, ms',
      'mean tail TBT, ms',
    )
    texts += [f'**{name}**', table(columns, rows)]
    panels[name] = {
      'effective, %': [
        (p, 100 * f['effective_request_capacity']) for p, f in by_split.items()
      ],
      'mean TTFT, s': [(p, f['ttft_s.mean']) for p, f in by_split.items()],
      'mean TBT, ms': [(p, 1e3 * f['tbt_s.mean']) for p, f in by_split.items()],
    }
  return Section(
    'Blind: the P:D split of 16 nodes',
    ['Limits 10 s and 100 ms.', *texts],
    plots={'split': line_panels(panels, 'prefill nodes', '')},
  )
