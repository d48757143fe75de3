# SPDX-License-Identifier: Apache-2.0
"""Sends a server what no client should, and looks at what it leaves behind.

  python scripts/fuzz_gateway.py configs/serve/NAME.gin [--requests 10000]
    [--seed 0] [--examples 100]

Hostile clients on raw sockets (scripts/fuzzing/wire.py), then schemathesis
over the server's OpenAPI document where `make peers PEERS=schemathesis` made
its environment. The exit status is 1 if the server failed, hung or leaked.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
import json
import subprocess
import sys
import tempfile
from urllib.request import Request
from urllib.request import urlopen

from scripts.benches.turns import interpreter
from scripts.errors import one_line_errors
from scripts.fuzzing import ledger
from scripts.fuzzing import wire
from scripts.fuzzing.bodies import CHAT
from scripts.fuzzing.bodies import good
from scripts.fuzzing.server import running
from scripts.fuzzing.server import Server

CLIENTS = 8
# What memory may grow by in the second half of all requests.
MOST_GROWTH = 0.1
MOST_TOLD = 20
CHECKS = (
  'not_a_server_error',
  'status_code_conformance',
  'content_type_conformance',
  'response_schema_conformance',
)
TIMEOUT_S = 1200


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('config', help='a gin file, see configs/serve')
  parser.add_argument('--bind', action='append', default=[], metavar='X.y=z')
  parser.add_argument('--requests', type=int, default=10_000)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--examples', type=int, default=100, help='of schemathesis, an operation'
  )
  args = parser.parse_args(argv)
  with one_line_errors(), running(args.config, args.bind) as server:
    model = ledger.fetch(f'{server.url}/v1/models')['data'][0]['id']
    wrong = [*_run(server, model, args.seed, args.requests, args.examples)]
  for each in wrong[:MOST_TOLD]:
    print(f'WRONG {each}')
  print(f'failed: {len(wrong)} things' if wrong else 'ok')
  return 1 if wrong else 0


def _run(
  server: Server, model: str, seed: int, requests: int, examples: int
) -> Iterator[str]:
  """What went wrong; the first half of all requests warms the server."""
  warm = range(seed, seed + requests // 2)
  yield from attack(server, model, warm)
  before = ledger.settled(server.pid, server.url)
  yield from attack(server, model, range(warm.stop, seed + requests))
  yield from _schemathesis(server, examples, seed)
  after = ledger.settled(server.pid, server.url)
  print(f'before {before}\nafter  {after}')
  yield from ledger.leaks(before, after, MOST_GROWTH)
  yield from well(server, model)


def attack(server: Server, model: str, seeds: range) -> list[str]:
  """Sends a case for each seed; tells what a server must not do."""
  told, wrong = Counter(), []
  with ThreadPoolExecutor(CLIENTS) as clients:
    cases = [wire.case(seed, model) for seed in seeds]
    sent = clients.map(lambda case: _sent(server.port, case), cases)
    for seed, case, answer in zip(seeds, cases, sent):
      if isinstance(answer, str):
        wrong.append(f'{seed=} {case.name}: {answer}')
        continue
      told.update((case.name, code) for code in answer.codes or (0,))
      wrong += [
        f'{seed=} {case.name}: {code} {answer.raw[-200:]!r}'
        for code in answer.codes
        if code >= 500 and code != 501
      ]
  for (name, code), count in sorted(told.items()):
    print(f'{count:6} {name}: {code or "no answer"}')
  return wrong


def _sent(port: int, case: wire.Case) -> wire.Answers | str:
  try:
    return wire.send(port, case)
  except OSError as error:
    return f'{type(error).__name__} {error}'


def well(server: Server, model: str) -> list[str]:
  """Whether a good request is still answered."""
  body = json.dumps(good(model, CHAT)).encode()
  headers = {'Content-Type': 'application/json'}
  asked = Request(f'{server.url}{CHAT}', body, headers)
  with urlopen(asked, timeout=wire.TIMEOUT_S) as answer:
    found = json.load(answer)
  ok = found['choices'][0]['message']['content'] and found['usage']
  return [] if ok else [f'a good request got {found}']


def _schemathesis(server: Server, examples: int, seed: int) -> list[str]:
  python = interpreter('schemathesis')
  if python is None:
    print('no schemathesis here: make peers PEERS=schemathesis')
    return []
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [
        str(python.with_name('schemathesis')),
        'run',
        f'{server.url}/openapi.json',
        '--phases=coverage,fuzzing',
        f'--checks={",".join(CHECKS)}',
        f'--max-examples={examples}',
        f'--seed={seed}',
        f'--workers={CLIENTS // 2}',
        f'--request-timeout={wire.TIMEOUT_S}',
        '--suppress-health-check=all',
        '--continue-on-failure',
        '--no-shrink',
      ],
      cwd=folder,
      timeout=TIMEOUT_S,
      capture_output=True,
      text=True,
    )
  print(done.stdout[-6000:])
  return (
    [f'schemathesis ended with {done.returncode}'] if done.returncode else []
  )


if __name__ == '__main__':
  sys.exit(main())
