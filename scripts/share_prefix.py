# SPDX-License-Identifier: Apache-2.0
"""Two processes share a prompt's KVCache through a real Mooncake Store.

python scripts/share_prefix.py [--model models/smollm2-135m] [--tokens 1080]

Starts a master and a process that lends memory, then one process after the
other serves the same prompt with its own JAX runtime and empty caches. The
first computes it and puts its blocks; the second gets them, computes the
rest and must say the same tokens. Exit status 1 if it found none or differs.
"""

import argparse
import json
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

from mooncake_jax.model_config import ModelConfig
from scripts.errors import one_line_errors
from scripts.gin_source import ROOT
from scripts.models import Model
from scripts.mooncake_master import running_master
from scripts.mooncake_master import running_storage

MIB = 1 << 20
SERVE_S = 600.0
# Where the model's folder is not there: random weights of this shape.
STAND_IN = ModelConfig(
  'llama',
  vocab_size=512,
  model_dim=256,
  mlp_dim=512,
  num_layers=8,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  max_tokens=4096,
)


def share(model: str, num_tokens: int, storage_mib: int) -> dict[str, Any]:
  """Serves a prompt twice; returns what 'first' and 'second' say of it."""
  said: dict[str, Any] = {}
  with running_master() as master:
    with running_storage(master.address, storage_mib * MIB) as storage:
      for name in ('first', 'second'):
        said[name] = serve(model, num_tokens, master.address, storage.address)
  said['same_tokens'] = said['first']['answer'] == said['second']['answer']
  return said


def serve(
  model: str, num_tokens: int, master: str, daemon: str | None = None
) -> dict[str, Any]:
  """Serves in a process of its own, over TCP or memory of the daemon."""
  command = [
    *(sys.executable, '-m', 'scripts.share_prefix_serve'),
    *('--model', model, '--tokens', str(num_tokens), '--master', master),
    *(('--daemon', daemon) if daemon else ()),
  ]
  done = subprocess.run(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SERVE_S
  )
  if done.returncode:
    raise OSError(f'{command[2]} ended with {done.returncode}')
  return json.loads(done.stdout.splitlines()[-1])


def _show(said: dict[str, Any]) -> None:
  heads = ('TTFT ms', 'of it get', 'hit tokens', 'of', 'put blocks')
  print(' ' * 8 + ''.join(f'{head:>12}' for head in heads))
  for name in ('first', 'second'):
    found = said[name]
    print(
      f'{name:8}{found["ttft_s"] * 1e3:12.1f}{found["get_s"] * 1e3:12.1f}'
      f'{found["hit_tokens"]:12}{found["prompt_tokens"]:12}'
      f'{found["put_blocks"]:12}'
    )
  ratio = said['first']['ttft_s'] / said['second']['ttft_s']
  print(f'TTFT {ratio:.1f} x faster, same tokens: {said["same_tokens"]}')


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('--model', default='models/smollm2-135m')
  parser.add_argument('--tokens', type=int, default=1080, help='of the prompt')
  parser.add_argument('--storage_mib', type=int, default=512)
  parser.add_argument('--json', type=Path, help='also write what was found')
  args = parser.parse_args(argv)
  if Model(args.model, STAND_IN).find() is None:
    print(f'{args.model}: not there, random weights instead', file=sys.stderr)
  start_s = time.perf_counter()
  with one_line_errors():
    said = share(args.model, args.tokens, args.storage_mib)
  _show(said)
  print(f'{time.perf_counter() - start_s:.0f} s in all')
  if args.json:
    args.json.write_text(json.dumps(said, indent=2) + '\n')
  return 0 if said['same_tokens'] and said['second']['hit_tokens'] else 1


if __name__ == '__main__':
  sys.exit(main())
