# SPDX-License-Identifier: Apache-2.0
"""Serves a workload as a gin file says, on devices or in simulation.

  python scripts/run.py configs/run/NAME.gin [--bind 'X.y=z'] [--out DIR]
    [--parquet] [--resume] [--multihost |
    --coordinator HOST:PORT --num-processes N --process-id I]

Prints a progress bar and a table, and leaves the results folder in DIR, or in
results/NAME, or with --bind in results/NAME-y=z, beside what it varies. The
exit status is 2 for a mistake in the configuration, 1 for anything that the run
then meets, and 143 if SIGTERM ended it: with --resume the same command goes on
(see scripts/resuming.py), begins where nothing was begun, and does nothing
where all is done.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
import re
import sys

from mooncake_jax.report.parquet import require_pyarrow
from mooncake_jax.report.parquet import write_parquet
from mooncake_jax.report.unfinished import is_unfinished
from scripts import resuming
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.hosts import add_options
from scripts.hosts import follow
from scripts.hosts import hosts_of
from scripts.hosts import on_hosts
from scripts.running import folder_of
from scripts.running import run
from scripts.serving import backends

LONGEST_NAME = 80  # of a folder's; some file systems take 255 bytes


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('config', help='a gin file, see configs/run')
  parser.add_argument(
    '--bind', action='append', default=[], metavar='X.y=z', help='comes last'
  )
  parser.add_argument('--out', type=Path, help='default: results/NAME[-y=z]')
  parser.add_argument(
    '--parquet', action='store_true', help='records.parquet besides'
  )
  parser.add_argument(
    '--resume', action='store_true', help='go on with what DIR holds'
  )
  add_options(parser)
  args = parser.parse_args(argv)
  out = args.out or Path('results') / name_of(args.config, args.bind)
  with one_line_errors():
    if args.parquet:
      require_pyarrow()  # Known before the run, not after it.
    experiment, operative = load(args.config, args.bind, Experiment)
    if args.resume:
      resuming.check_same(out, operative)
      if resuming.is_done(out):
        print(f'done already: {out}')
        return 0
    elif is_unfinished(out):
      print(f'{out}: begins anew; --resume would go on', file=sys.stderr)
    hosts = hosts_of(args, experiment)
    opened = backends if hosts is None else partial(on_hosts, hosts)
    try:
      with resuming.ends_on_sigterm():
        if hosts is not None and not hosts.join(experiment):
          follow(experiment)
          return 0
        outcomes = run(experiment, operative, out, opened, resumes=args.resume)
    except resuming.Preempted:
      print(f'ended by SIGTERM; --resume goes on: {out}', file=sys.stderr)
      return resuming.PREEMPTED
    for name, outcome in outcomes.items() if args.parquet else ():
      folder = folder_of(out, name)
      write_parquet(folder / 'records.parquet', outcome.records)
  return 0


def name_of(config: str, bindings: Sequence[str]) -> str:
  """The file's, and what differs from it: 'sim_cpp-chunk_tokens=1024'."""
  differences = [binding.partition('=') for binding in bindings]
  found = '-'.join(
    f'{name.strip().rpartition(".")[2]}={value.strip()}'
    for name, _, value in differences
  )
  safe = re.sub(r'[^\w.=@+-]+', '_', found.replace("'", '').replace('"', ''))
  if len(safe) > LONGEST_NAME:
    safe = f'{safe[:LONGEST_NAME]}-{sha256(found.encode()).hexdigest()[:8]}'
  return '-'.join(filter(None, (Path(config).stem, safe)))


if __name__ == '__main__':
  sys.exit(main())
