# SPDX-License-Identifier: Apache-2.0
"""A summary as plain text, under the names of `summary.json`."""

from collections.abc import Mapping

from mooncake_jax.metrics.summary import Summary


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


def _lines(summary: Summary) -> list[tuple[str, str]]:
  lines = []
  for name, value in summary.to_dict().items():
    if isinstance(value, dict):
      lines += [(f'{name}.{k}', number(v)) for k, v in value.items()]
    else:
      lines.append((name, number(value)))
  return lines


def number(value: float | None) -> str:
  """Counts as they are, other numbers to four digits: 12031, 0.3736, -."""
  if value is None:
    return '-'
  return str(value) if isinstance(value, int) else f'{value:.4g}'
