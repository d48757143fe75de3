# SPDX-License-Identifier: Apache-2.0
"""FAST'25 figures 1, 6 and 7: effective requests of each system; figure 8:
prefill time of each."""

from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from mooncake_jax.report.lines import line_panels
from scripts.reproduction.page import deviation
from scripts.reproduction.page import points
from scripts.reproduction.page import Section
from scripts.reproduction.page import table
from scripts.reproduction.runs import Runs

SYSTEMS = ('Mooncake', 'vLLM', '+ caching', '+ chunks', '+ both', 'DistServe')
LIMITS_MS = ('100', '200', '300')
SHOWN_MS = ('50', '80', '100', '150', '200', '300', '500', '1000')
# Share in % of requests with a TBT of at most SHOWN_MS, read off the figures.
PAPER = {
  'conversation': {
    'Mooncake': (3.5, 66.3, 96.6, 99.8, 100, 100, 100, 100),
    'vLLM': (3.3, 13.4, 16.1, 25.8, 38.8, 62.8, 86.4, 97.9),
    '+ caching': (1.8, 12.3, 15.1, 23.7, 34.3, 56.0, 80.8, 96.3),
    '+ chunks': (1.2, 7.6, 9.4, 17.4, 28.8, 55.4, 96.5, 100),
  },
  'tool_agent': {
    'Mooncake': (9.5, 72.3, 93.2, 98.8, 99.8, 100, 100, 100),
    'vLLM': (2.2, 33.3, 43.1, 44.0, 45.3, 49.8, 66.0, 92.1),
    '+ caching': (12.7, 53.2, 56.5, 63.2, 70.0, 81.3, 91.3, 96.7),
    '+ chunks': (0.9, 12.3, 18.7, 20.0, 21.3, 40.4, 87.9, 99.2),
  },
  'synthetic': {
    'Mooncake': (83.2, 99.0, 99.6, 100, 100, 100, 100, 100),
    'vLLM': (54.1, 58.5, 61.3, 67.0, 71.0, 78.1, 85.0, 91.2),
    '+ caching': (53.9, 58.2, 61.0, 66.6, 70.8, 77.2, 85.6, 92.5),
    '+ chunks': (42.5, 44.9, 46.6, 52.2, 57.3, 69.5, 98.5, 99.9),
  },
}
# Mean prefill GPU seconds a request, read off figure 8.
PREFILL_S = {
  'conversation': (1.06, 1.66, 1.52, 2.02),
  'tool_agent': (0.53, 1.12, 0.74, 1.42),
  'synthetic': (0.73, 2.02, 1.90, 2.44),
}
Figures = Mapping[str, Any]
BySystem = dict[str, dict[str, Figures]]


def systems(runs: Runs) -> BySystem:
  """Figures by workload and system."""
  found: BySystem = {name: {} for name in PAPER}
  for sweep, label in (('workloads', 'Mooncake'), ('distserve', 'DistServe')):
    for run in runs.sweep(sweep):
      found[run.values['paper_rows.name']][label] = run.figures
  labels = {
    (False, False): 'vLLM',
    (False, True): '+ caching',
    (True, False): '+ chunks',
    (True, True): '+ both',
  }
  for run in runs.sweep('vllm_systems'):
    name, chunks, caching = run.values.values()
    found[name][labels[chunks, caching]] = run.figures
  return found


def capacity(runs: Runs) -> Section:
  found = systems(runs)
  rows, panels, checks = [], {}, {}
  for name, by_system in found.items():
    rows += _capacity_rows(name, by_system)
    panels[name] = {s: _curve(by_system[s]) for s in SYSTEMS}
    checks |= _orders(name, by_system) | _nearness(name, by_system)
  columns = ('workload', 'system')
  for ms in LIMITS_MS:
    columns += (f'{ms} ms, paper', f'{ms} ms', 'points')
  figure = line_panels(panels, 'TBT limit, ms', 'effective requests, %')
  return Section(
    "Effective request capacity (FAST'25 figures 1, 6 and 7)",
    [
      '16 nodes each: 8 + 8 of Mooncake and of a DistServe-like system '
      '(prefill and decode apart, no store), 16 vLLM-like ones '
      '(`systems/vllm.py`). Share in % of all requests with a TTFT of at most '
      "30 s and a TBT (mean of the longest tenth of a request's intervals) "
      'within the limit. Tool & agent is generated: only its order counts.',
      table(columns, rows),
    ],
    plots={'capacity': figure},
    checks=checks,
  )


def _curve(figures: Figures) -> list[tuple[int, float]]:
  return [(int(ms), 100 * figures['capacity'][ms]) for ms in SHOWN_MS]


def _capacity_rows(name: str, by_system: dict[str, Figures]) -> Iterator[tuple]:
  for system in SYSTEMS:
    cells: list[str] = []
    for ms in LIMITS_MS:
      ours = by_system[system]['capacity'][ms]
      paper = PAPER[name].get(system)
      printed = None if paper is None else paper[SHOWN_MS.index(ms)]
      cells += [
        '-' if printed is None else f'{printed:.1f}',
        f'{100 * ours:.1f}',
        '-' if printed is None else points(ours, printed / 100),
      ]
    yield (name, system, *cells)


def _orders(name: str, by_system: dict[str, Figures]) -> dict[str, bool]:
  """The paper's order of systems, where its numbers are 2 points apart."""
  checks = {}
  for ms in LIMITS_MS:
    column = SHOWN_MS.index(ms)
    paper = {system: row[column] for system, row in PAPER[name].items()}
    order = sorted(paper, key=lambda system: -paper[system])
    ours = {s: by_system[s]['capacity'][ms] for s in paper}
    holds = all(
      ours[a] >= ours[b]
      for i, a in enumerate(order)
      for b in order[i + 1 :]
      if paper[a] - paper[b] >= 2
    )
    checks[f'{name}, {ms} ms: {" > ".join(order)}'] = holds
  return checks


def _nearness(name: str, by_system: dict[str, Figures]) -> dict[str, bool]:
  """Whether a published trace gives each system's shares."""
  if name == 'tool_agent':
    return {}
  checks = {}
  for system, paper in PAPER[name].items():
    ours = by_system[system]['capacity']
    checks[f'{name}, {system}: within 10 points at each limit'] = all(
      abs(100 * ours[ms] - paper[SHOWN_MS.index(ms)]) <= 10 for ms in LIMITS_MS
    )
  return checks


def prefill_time(runs: Runs) -> Section:
  found, rows, checks = systems(runs), [], {}
  for name, by_system in found.items():
    base_s = by_system['Mooncake']['prefill_s']
    printed = dict(zip(SYSTEMS, PREFILL_S[name]))
    for system in SYSTEMS:
      ours_s, paper_s = by_system[system]['prefill_s'], printed.get(system)
      rows.append(
        (
          name,
          system,
          paper_s,
          ours_s,
          deviation(ours_s, paper_s),
          f'{paper_s / printed["Mooncake"]:.2f}x' if paper_s else '-',
          f'{ours_s / base_s:.2f}x',
          by_system[system]['hit_rate'],
        )
      )
    order = sorted(printed, key=lambda s: printed[s])
    seconds = [by_system[system]['prefill_s'] for system in order]
    checks[f'{name}: {" < ".join(order)}'] = seconds == sorted(seconds)
    for system, paper_s in printed.items():
      ours_s = by_system[system]['prefill_s']
      if name != 'tool_agent':
        near = abs(ours_s / paper_s - 1) <= 0.15
        checks[f'{name}, {system}: within 15 %'] = near
  return Section(
    "Prefill time of each system (FAST'25 figure 8)",
    [
      'Mean prefill GPU seconds a request (of one node), and how many times '
      "Mooncake's that is. With chunks it is what the passes take less what "
      'the rows that ride along add.',
      table(
        (
          'workload',
          'system',
          'paper',
          'ours',
          'deviation',
          'paper',
          'ours',
          'hit rate',
        ),
        rows,
      ),
    ],
    checks=checks,
  )
