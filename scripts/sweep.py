# SPDX-License-Identifier: Apache-2.0
"""Runs points over bindings of a run file, and tells them as one table.

  python scripts/sweep.py RUN.gin --over 'X.y=[1, 2]' [--over ...]
    [--mode grid|list|random]
  python scripts/sweep.py configs/sweep/NAME.gin
  python scripts/sweep.py ... --slurm slurm_partition=gpu timeout_min=60
  python scripts/sweep.py ... --ray [ADDRESS]

Each point is a process of its own with its results in a folder of its own;
what is done already is not run again. In results/NAME then lie table.csv,
plot.svg and a folder a point. The exit status is 1 if a point failed.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
import sys
from typing import get_args

from rich.console import Console

from scripts.config import ConfigError
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.gin_source import binds
from scripts.sweeps import inline
from scripts.sweeps import on_ray
from scripts.sweeps import processes
from scripts.sweeps import slurm
from scripts.sweeps.grid import Mode
from scripts.sweeps.grid import parse_axis
from scripts.sweeps.grid import Sweep
from scripts.sweeps.sweep import run_sweep
from scripts.sweeps.sweep import Runner
from scripts.sweeps.table import printed


def main(argv: list[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  out = args.out or Path('results') / Path(args.config).stem
  with one_line_errors():
    sweep = read_sweep(args.config, args.over, args.bind, args.show, args.mode)
    rows = run_sweep(sweep, out, _runner(args), again=args.again)
    title = f'{sweep.run}, {len(rows)} runs in {out}'
    Console(width=200).print(printed(rows, sweep.show, title))
  return 1 if any(row.reason for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('config', help='a run file, or a sweep file (configs/sweep)')
  axis = 'values of a binding, also @functions; once for each axis'
  add('--over', action='append', default=[], metavar='X.y=[...]', help=axis)
  add('--mode', choices=get_args(Mode), help='default: grid')
  add('--bind', action='append', default=[], metavar='X.y=z', help='of all')
  shown = 'of docs/metrics.md, shown first: ttft_s.p99'
  add('--show', action='append', default=[], metavar='FIGURE', help=shown)
  add('--out', type=Path, help='default: results/NAME')
  add(
    '--workers',
    type=int,
    default=0,
    help='runs at a time; default: one a core, on devices one',
  )
  here = 'one after another in this process, sharing devices'
  add('--inline', action='store_true', help=here)
  add('--timeout-s', type=float, default=3600.0, help='of one run')
  add('--again', action='store_true', help='also what is done')
  add('--ray', nargs='?', const='', metavar='ADDRESS', help='none: local')
  add('--slurm', nargs='*', metavar='KEY=VALUE', help='options of submitit')
  return parser


def read_sweep(
  config: str,
  over: list[str],
  bind: list[str],
  show: list[str],
  mode: Mode | None = None,
) -> Sweep:
  """A sweep file's, or one of a run file; what is added comes last."""
  sweep = Sweep(config)
  if binds(config, Sweep):
    sweep, _ = load(config, (), Sweep)
  axes = {**sweep.over, **dict(parse_axis(text) for text in over)}
  if not axes:
    raise ConfigError(f"{config}: nothing to sweep; give --over 'X.y=[...]'")
  return replace(
    sweep,
    over=axes,
    mode=mode or sweep.mode,
    bind=(*sweep.bind, *bind),
    show=(*show, *(name for name in sweep.show if name not in show)),
  )


def _runner(args: argparse.Namespace) -> Runner:
  if args.inline:
    return inline.run_points
  if args.ray is not None:
    return partial(
      on_ray.run_points,
      address=args.ray or None,
      workers=args.workers,
      timeout_s=args.timeout_s,
    )
  if args.slurm is None:
    return partial(
      processes.run_points, workers=args.workers, timeout_s=args.timeout_s
    )
  return partial(
    slurm.run_points,
    workers=args.workers or 256,
    options=slurm.parse_options(args.slurm),
  )


if __name__ == '__main__':
  sys.exit(main())
