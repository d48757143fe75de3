# SPDX-License-Identifier: Apache-2.0
"""Serves a workload as a gin file says, on devices or in simulation.

  python scripts/run.py configs/run/NAME.gin [--bind 'X.y=z'] [--out DIR]
    [--parquet] [--track tensorboard|wandb] [--resume] [--multihost |
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
from mooncake_jax.report.tracking import require
from mooncake_jax.report.tracking import track
from mooncake_jax.report.tracking import TRACKERS
from mooncake_jax.report.unfinished import is_unfinished
from scripts import resuming
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.hosts import add_options
from scripts.hosts import follow
from scripts.hosts import job_of
from scripts.hosts import join
from scripts.hosts import on_hosts
from scripts.running import folder_of
from scripts.running import run
from scripts.serving import Outcome

LONGEST_NAME = 80  # of a folder's; some file systems take 255 bytes


def main(argv: list[str] | None = None) -> int:
  args = _parser().parse_args(argv)
  out = args.out or Path('results') / name_of(args.config, args.bind)
  with one_line_errors():
    if args.parquet:
      require_pyarrow()  # Known before the run, not after it.
    if args.track:
      require(args.track)
    experiment, operative = load(args.config, args.bind, Experiment)
    if args.resume:
      resuming.check_same(out, operative)
      if resuming.is_done(out):
        print(f'done already: {out}')
        return 0
    elif is_unfinished(out):
      print(f'{out}: begins anew; --resume would go on', file=sys.stderr)
    try:
      with resuming.ends_on_sigterm():
        outcomes = _run(args, experiment, operative, out)
    except resuming.Preempted:
      print(f'ended by SIGTERM; --resume goes on: {out}', file=sys.stderr)
      return resuming.PREEMPTED
    for name, outcome in outcomes.items():
      _leave_besides(args, experiment.title, folder_of(out, name), outcome)
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  add = parser.add_argument
  add('config', help='a gin file, see configs/run')
  add('--bind', action='append', default=[], metavar='X.y=z', help='comes last')
  add('--out', type=Path, help='default: results/NAME[-y=z]')
  add('--parquet', action='store_true', help='records.parquet besides')
  add('--track', choices=TRACKERS, help='figures there besides')
  add('--resume', action='store_true', help='go on with what DIR holds')
  add_options(parser)
  return parser


def _run(
  args: argparse.Namespace, experiment: Experiment, operative: str, out: Path
) -> dict[str, Outcome]:
  """What it gave; nothing in a process that follows another."""
  job = job_of(args, experiment)
  if job is None:
    return run(experiment, operative, out, resumes=args.resume)
  if not join(job, experiment):
    follow(experiment)
    return {}
  led = partial(on_hosts, job)
  return run(experiment, operative, out, led, resumes=args.resume)


def _leave_besides(
  args: argparse.Namespace, title: str, folder: Path, outcome: Outcome
) -> None:
  if args.parquet:
    write_parquet(folder / 'records.parquet', outcome.records)
  if args.track:
    track(args.track, folder, title, outcome.records, outcome.summary)


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
