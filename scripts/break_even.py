# SPDX-License-Identifier: Apache-2.0
"""Measures where fetching KVCache beats recomputing it, on this machine.

  python scripts/break_even.py configs/assess/here/NAME.gin
    [--bind 'X.y=z'] [--budget-s 120] [--repeats 20] [--out FILE.json]

Serves prompts through the engine, the store and the transfer engine with their
prefix computed, or read from HBM, DRAM, another instance's DRAM or the SSD, and
prints the measured break-even beside FAST'25's formula. What is kept in
results/break_even/NAME.json is shown on the pages of scripts/assess.py.
"""

import argparse
from pathlib import Path
import sys

from mooncake_jax.assess.measured import measured_even
from mooncake_jax.report.measured import told
from mooncake_jax.report.measured import write_measured
from scripts.assessment.here import measure_here
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment


def main(argv: list[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  with one_line_errors():
    experiment, _ = load(args.config, args.bind, Experiment)
    measured = measure_here(experiment, args.budget_s, args.repeats)
  name = f'{Path(args.config).stem}.json'
  out = args.out or Path('results/break_even') / name
  out.parent.mkdir(parents=True, exist_ok=True)
  write_measured(out, measured)
  print(f'{told(measured, measured_even(measured))}\n\nresults: {out}')
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('config', help='see configs/assess/here')
  add('--bind', action='append', default=[], metavar='X.y=z')
  add('--budget-s', type=float, default=120.0, help='of measuring')
  add('--repeats', type=int, default=20, help='of each prompt, at most')
  add('--out', type=Path, help='default: results/break_even/NAME.json')
  return parser


if __name__ == '__main__':
  sys.exit(main())
