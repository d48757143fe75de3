# SPDX-License-Identifier: Apache-2.0
"""Runs benchmarks; the exit status is 1 while a target is missed.

python scripts/bench.py prefill decode store master hits [--json FILE] [--quick]
"""

import argparse
from datetime import datetime
import json
from pathlib import Path
import sys

import jax
from rich.console import Console
from rich.table import Table

from mooncake_jax.report.environment import environment
from mooncake_jax.transfer.host_memory import keep_freed_memory
from scripts.benches import BENCHES
from scripts.benches.rows import Row
from scripts.device import start_jax


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('names', nargs='+', choices=[*BENCHES], metavar='NAME')
  parser.add_argument('--json', type=Path, help='also write the rows here')
  parser.add_argument('--quick', action='store_true', help='fewer repeats')
  args = parser.parse_args(argv)
  start_jax(num_devices=4)
  started = datetime.now().isoformat(timespec='seconds')
  rows = [row for name in args.names for row in BENCHES[name](args.quick)]
  show(rows)
  if args.json:
    devices = [str(device) for device in jax.devices()]
    found = {
      'environment': environment(devices, None, started),
      'rows': [row.to_dict() for row in rows],
    }
    args.json.write_text(json.dumps(found, indent=2) + '\n')
  return 0 if all(row.ok for row in rows) else 1


def show(rows: list[Row]) -> None:
  table = Table(title='Benchmarks', title_justify='left')
  for column in ('metric', 'value', 'unit', 'target', 'ok', 'reference'):
    table.add_column(column)
  for row in rows:
    target = '' if row.target is None else f'{row.target:g}'
    ok = ('yes' if row.ok else 'NO') if target else ''
    cells = (row.metric, f'{row.value:.4g}', row.unit, target, ok)
    table.add_row(*cells, row.reference)
  Console(width=140).print(table)


if __name__ == '__main__':
  keep_freed_memory()  # before there are threads
  sys.exit(main())
