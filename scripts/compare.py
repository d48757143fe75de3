# SPDX-License-Identifier: Apache-2.0
"""Puts runs side by side: their figures in columns, TTFT and TBT in one plot.

  python scripts/compare.py results/A results/B [--out compare.html]

Each is a results folder, of a run or of a sweep's point.
"""

import argparse
import json
from pathlib import Path
import sys

from mooncake_jax.metrics.summary import Summary
from mooncake_jax.metrics.table import comparison
from mooncake_jax.report.page import comparison_page
from mooncake_jax.report.records import read_records
from scripts.errors import one_line_errors


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('folders', nargs='+', type=Path, metavar='FOLDER')
  parser.add_argument('--out', type=Path, default=Path('compare.html'))
  args = parser.parse_args(argv)
  with one_line_errors():
    runs = {
      folder.name: (
        read_records(folder / 'records.jsonl'),
        Summary.from_dict(json.loads((folder / 'summary.json').read_text())),
      )
      for folder in args.folders
    }
  print(comparison({name: summary for name, (_, summary) in runs.items()}))
  args.out.write_text(comparison_page(' · '.join(runs), runs))
  print(f'\nplots: {args.out}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
