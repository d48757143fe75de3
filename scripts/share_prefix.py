# SPDX-License-Identifier: Apache-2.0
"""Two processes share their prompts' KVCache through a real Mooncake Store.

python scripts/share_prefix.py [--config configs/run/mooncake_store.gin]

Starts a master and a process that lends memory, then runs the config twice,
one process after the other, each with its own JAX runtime and empty memory.
The first computes its prompts and puts their blocks; the second gets them,
computes the rest and must say the same tokens. Exit status 1 if it found none
or differs.
"""

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
from statistics import fmean
import subprocess
import sys
import tempfile
from typing import Any

from mooncake_jax.report.records import read_records
from mooncake_jax.request import RequestRecord
from scripts.errors import one_line_errors
from scripts.gin_source import ROOT
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

MIB = 1 << 20
RUN_S = 900.0
CONFIG = 'configs/run/mooncake_store.gin'


def share(
  config: str, bindings: Sequence[str], storage_mib: int
) -> dict[str, Any]:
  """Runs a config twice; returns what 'first' and 'second' say of it."""
  with running_master() as master:
    with running_storage(master.address, storage_mib * MIB) as storage:
      first, second = (
        run(config, bindings, master.address, storage.address) for _ in range(2)
      )
  answers = [
    {r.request_id: r.output_tokens for r in found} for found in (first, second)
  ]
  return {
    'first': _found(first),
    'second': _found(second),
    'same_tokens': answers[0] == answers[1],
  }


def run(
  config: str, bindings: Sequence[str], master: str, daemon: str | None = None
) -> list[RequestRecord]:
  """Serves in a process of its own, over TCP or memory of the daemon.

  Raises:
    OSError: it ended otherwise than well, or not in `RUN_S`.
  """
  told = [f'MooncakeConfig.master={master!r}', *bindings]
  if daemon is not None:
    told.append(f'MooncakeConfig.daemon={daemon!r}')
  with tempfile.TemporaryDirectory() as out:
    command = [sys.executable, '-m', 'scripts.run', config, '--out', out]
    for binding in told:
      command += ['--bind', binding]
    try:
      done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=RUN_S)
    except subprocess.TimeoutExpired:
      raise OSError(f'{config} took longer than {RUN_S:g} s') from None
    if done.returncode:
      raise OSError(f'{config} ended with {done.returncode}')
    return read_records(Path(out) / 'records.jsonl')


def _found(records: list[RequestRecord]) -> dict[str, Any]:
  """Of all requests, and of those that had not been asked for before."""
  tokens: dict[str, int] = {}
  for record in records:
    for tier, count in record.reused_tokens.items():
      tokens[tier] = tokens.get(tier, 0) + count
  return {
    'mean_ttft_s': fmean(r.ttft_s for r in records if r.ttft_s is not None),
    'prompt_tokens': sum(r.prompt_tokens for r in records),
    'reused_tokens': tokens,
    'completed': sum(r.outcome == 'completed' for r in records),
  }


def _show(said: dict[str, Any]) -> None:
  heads = ('mean TTFT s', 'tokens', 'of the store', 'of its own')
  print(' ' * 8 + ''.join(f'{head:>14}' for head in heads))
  for name in ('first', 'second'):
    found = said[name]
    of_store = found['reused_tokens'].get('remote_store', 0)
    of_own = sum(found['reused_tokens'].values()) - of_store
    print(
      f'{name:8}{found["mean_ttft_s"]:14.3f}{found["prompt_tokens"]:14}'
      f'{of_store:14}{of_own:14}'
    )
  ratio = said['first']['mean_ttft_s'] / said['second']['mean_ttft_s']
  print(f'TTFT {ratio:.1f} x faster, same tokens: {said["same_tokens"]}')


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--config', default=CONFIG, help='see configs/run')
  parser.add_argument(
    '--bind', action='append', default=[], metavar='X.y=z', help='comes last'
  )
  parser.add_argument('--storage_mib', type=int, default=512)
  parser.add_argument('--json', type=Path, help='also write what was found')
  args = parser.parse_args(argv)
  with one_line_errors():
    said = share(args.config, args.bind, args.storage_mib)
  _show(said)
  if args.json:
    args.json.write_text(json.dumps(said, indent=2) + '\n')
  found = said['second']['reused_tokens'].get('remote_store', 0)
  return 0 if said['same_tokens'] and found else 1


if __name__ == '__main__':
  sys.exit(main())
