# SPDX-License-Identifier: Apache-2.0
"""Simulates the papers' experiments and writes docs/reproduction.md.

  MOONCAKE_JAX_TRACES=FOLDER \
  python scripts/reproduce.py [NAME...] [--quick] [--again] [--workers N]

Without names, all. Each run's figures are kept in --out (results/reproduce), so
that what was interrupted goes on, and a page of all that is kept is cheap.
With names or --quick the page goes there, not to docs. A sweep file of
configs/reproduce and a module of scripts/reproduction make an experiment.
"""

import argparse
from pathlib import Path
import sys

from scripts.errors import one_line_errors
from scripts.gin_source import ROOT
from scripts.reproduction.page import write
from scripts.reproduction.runs import Runs
from scripts.reproduction.table import EXPERIMENTS
from scripts.reproduction.table import HEAD

PAGE = ROOT / 'docs/reproduction.md'


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('names', nargs='*', metavar='NAME', help=', '.join(EXPERIMENTS))
  add('--quick', action='store_true', help='the first requests only')
  add('--again', action='store_true', help='also what is kept')
  add('--workers', type=int, default=1, help='runs at a time')
  add('--out', type=Path, default=Path('results/reproduce'))
  args = parser.parse_args(argv)
  if unknown := set(args.names) - set(EXPERIMENTS):
    parser.error(f'{unknown} are none of {", ".join(EXPERIMENTS)}')
  runs = Runs(args.out, args.quick, args.again, args.workers)
  names = args.names or [*EXPERIMENTS]
  with one_line_errors():
    sections = {name: EXPERIMENTS[name](runs) for name in names}
  page = args.out / 'reproduction.md' if args.names or args.quick else PAGE
  write(page, HEAD, sections)
  print(f'{page}: {len(sections)} experiments')
  return 0


if __name__ == '__main__':
  sys.exit(main())
