# SPDX-License-Identifier: Apache-2.0
"""Serves clients over HTTP as OpenAI's API has it, on devices or simulated.

  python scripts/serve.py configs/serve/NAME.gin [--bind 'X.y=z']
    [--host 127.0.0.1] [--port 8000] [--api-keys FILE]

Any run file will do; its workload is left alone. API keys come from FILE, a
JSON list of {"name", "key", ...}, or from MOONCAKE_JAX_API_KEYS=NAME:KEY,...;
without any, whoever can connect may ask, so that --host should stay as it is.
The first SIGINT or SIGTERM drains, the second stops. The exit status is 2 for a
mistake in the configuration, 1 for anything that the server then meets.
"""

import argparse
import gc
import os
from pathlib import Path
import socket
import sys

from mooncake_jax.gateway.server import Server
from mooncake_jax.gateway.tenants import from_file
from mooncake_jax.gateway.tenants import from_text
from mooncake_jax.gateway.tenants import Tenants
from scripts.config import load
from scripts.errors import one_line_errors
from scripts.experiment import Experiment
from scripts.service import gateway

API_KEYS = 'MOONCAKE_JAX_API_KEYS'
LOOPBACK = ('127.0.0.1', '::1', 'localhost')


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument('config', help='a gin file, see configs/serve')
  parser.add_argument(
    '--bind', action='append', default=[], metavar='X.y=z', help='comes last'
  )
  parser.add_argument('--host', default='127.0.0.1')
  parser.add_argument('--port', type=int, default=8000, help='0: any free one')
  parser.add_argument('--api-keys', type=Path, metavar='FILE')
  args = parser.parse_args(argv)
  with one_line_errors():
    tenants = _tenants(args.api_keys)
    if args.host not in LOOPBACK and not tenants.has_keys:
      print(
        f'--host {args.host} without API keys: anybody may ask', file=sys.stderr
      )
    _check_free(args.host, args.port)  # Known before the model is loaded.
    experiment, _ = load(args.config, args.bind, Experiment)
    return _serve(experiment, tenants, args.host, args.port)


def _serve(
  experiment: Experiment, tenants: Tenants, host: str, port: int
) -> int:
  with gateway(experiment, tenants) as made:
    # What is there stays. What clients leave in cycles, bodies included, is
    # collected as often as ever: rarer, memory grew with every client.
    gc.collect()
    gc.freeze()
    server = Server(
      made.app(), made.driver, made.spec, host, port, on_ready=_say
    )
    server.run()
  if made.driver.error is not None:
    print(f'error: {made.driver.error}', file=sys.stderr)
  return 0 if made.driver.error is None else 1


def _check_free(host: str, port: int) -> None:
  """Raises ValueError where nothing can listen."""
  if not 0 <= port < 1 << 16:  # else the system takes its lower bits
    raise ValueError(f'--port {port} must be 0 to 65535')
  try:
    family, kind, _, _, address = socket.getaddrinfo(
      host, port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      probe.bind(address)
  except OSError as error:
    told = error.strerror or str(error)
    raise ValueError(
      f'--host {host} --port {port}: {told.lower()}; --port 0 takes a free one'
    ) from None


def _say(url: str) -> None:
  print(f'serving on {url}', flush=True)


def _tenants(path: Path | None) -> Tenants:
  """Raises ValueError or OSError for keys that can't be read."""
  text = os.environ.get(API_KEYS, '')
  if path is not None and text:
    raise ValueError(f'--api-keys and {API_KEYS}: give one')
  if path is not None:
    return from_file(path)
  return from_text(text) if text else Tenants()


if __name__ == '__main__':
  sys.exit(main())
