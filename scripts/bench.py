# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks; the exit status is 1 while a target is missed.

python scripts/bench.py NAME... [--quick] [--json FILE] [--plot FILE.svg]

Names are those of `scripts/benches/table.py`.
"""

import argparse
from datetime import datetime
import gc
import json
from pathlib import Path
import sys

import jax
from rich.console import Console
from rich.table import Table

from mooncake_jax.report.environment import environment
from scripts.benches.plot import plot
from scripts.benches.rows import Row
from scripts.benches.table import BENCHES
from scripts.device import start_jax
from scripts.errors import one_line_errors


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument(
    'names',
    nargs='+',
    choices=[*BENCHES],
    metavar='NAME',
    help=', '.join(BENCHES),
  )
  parser.add_argument('--json', type=Path, help='also write the rows here')
  parser.add_argument('--plot', type=Path, help='draw series here (SVG, PNG)')
  parser.add_argument('--quick', action='store_true', help='fewer repeats')
  args = parser.parse_args(argv)
  start_jax(num_devices=4)
  started = datetime.now().isoformat(timespec='seconds')
  with one_line_errors():
    rows = [row for name in args.names for row in _run(name, args.quick)]
  show(rows)
  if args.json:
    devices = [str(device) for device in jax.devices()]
    found = {
      'environment': environment(devices, None, started),
      'rows': [row.to_dict() for row in rows],
    }
    args.json.write_text(json.dumps(found, indent=2) + '\n')
  if args.plot:
    plot(rows, args.plot)
  return 0 if all(row.ok for row in rows) else 1


def _run(name: str, quick: bool) -> list[Row]:
  """Runs a benchmark; the collector leaves alone what was there before it."""
  gc.collect()
  gc.freeze()
  return BENCHES[name](quick)


def show(rows: list[Row]) -> None:
  """Prints series by way, side by side, and all other rows one by one."""
  console = Console(width=140)
  if series := [row for row in rows if row.point]:
    console.print(_series(series))
  if singles := [row for row in rows if not row.point]:
    console.print(_singles(singles))


def _singles(rows: list[Row]) -> Table:
  table = Table(title='Benchmarks', title_justify='left')
  for column in ('metric', 'value', 'unit', 'target', 'ok', 'reference'):
    table.add_column(column)
  for row in rows:
    target = '' if row.target is None else f'{row.target:g}'
    ok = ('yes' if row.ok else 'NO') if target else ''
    value = '' if row.value is None else f'{row.value:.4g}'
    cells = (row.metric, value, row.unit, target, ok)
    table.add_row(*cells, row.reference)
  return table


def _series(rows: list[Row]) -> Table:
  table = Table(title='GB/s by block size and way', title_justify='left')
  ways = sorted({row.point.way for row in rows if row.point})
  for column in ('case', 'block KiB', *ways):
    table.add_column(column, justify='right')
  found: dict[tuple[str, int], dict[str, float]] = {}
  for row in rows:
    assert row.point and row.value is not None
    case = (row.point.panel, row.point.size_bytes)
    found.setdefault(case, {})[row.point.way] = row.value
  for (panel, size), by_way in sorted(found.items()):
    cells = (f'{by_way[w] / 1e9:.3g}' if w in by_way else '' for w in ways)
    table.add_row(panel, f'{size >> 10}', *cells)
  return table


if __name__ == '__main__':
  sys.exit(main())
