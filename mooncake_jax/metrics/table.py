# SPDX-License-Identifier: Apache-2.0
"""A summary as plain text, under the names of `summary.json`."""

from collections.abc import Mapping
from typing import Any

from mooncake_jax.metrics.summary import Summary

Line = tuple[str, str]


def table(summary: Summary) -> str:
  """One figure a line; latencies have a column for each statistic."""
  return comparison({'': summary})


def comparison(summaries: Mapping[str, Summary]) -> str:
  """The same with a column for each of several named runs."""
  columns = {name: dict(_lines(s)) for name, s in summaries.items()}
  names = dict.fromkeys(name for lines in columns.values() for name in lines)
  rows = [['', *columns]] if any(columns) else []
  for name in names:
    rows.append([name, *(lines.get(name, '-') for lines in columns.values())])
  widths = [max(map(len, cells)) for cells in zip(*rows)]
  lines = (
    '  '.join(
      [cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]
    )
    for cells in rows
  )
  return '\n'.join(line.rstrip() for line in lines)


def _lines(summary: Summary) -> list[Line]:
  figures = flat(summary.to_dict())
  return [(name, number(value)) for name, value in figures.items()]


def flat(figures: Mapping[str, Any]) -> dict[str, float | None]:
  """{'ttft_s': {'mean': 1.5}} -> {'ttft_s.mean': 1.5}."""
  found: dict[str, float | None] = {}
  for name, value in figures.items():
    if isinstance(value, Mapping):
      found |= {f'{name}.{k}': v for k, v in flat(value).items()}
    else:
      found[name] = value
  return found


def number(value: float | None) -> str:
  """Counts as they are, other numbers to four digits: 12031, 0.3736, -."""
  if value is None:
    return '-'
  return str(value) if isinstance(value, int) else f'{value:.4g}'
