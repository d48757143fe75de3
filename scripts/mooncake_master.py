# SPDX-License-Identifier: Apache-2.0
"""Runs a Mooncake master on this machine, for tests and demos.

python scripts/mooncake_master.py [--storage_mib 1024] [--lease_s 10]

Master and storage listen on loopback, except the storage's data ports, which
the wheel opens on all addresses whatever it is told. Both end with Ctrl-C.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import dataclass
import importlib.util
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from mooncake_jax.transfer.mooncake_client import EXTRA
from mooncake_jax.transfer.mooncake_client import LIBRARIES

HOST = '127.0.0.1'
TRIES = 3  # another process may take a free port first
READY_S = 10.0
STOP_S = 5.0


@dataclass(frozen=True)
class Server:
  """A running process and where it listens.

  Attributes:
    address: 'host:port' that clients are told.
  """

  process: subprocess.Popen
  address: str

  def kill(self) -> None:
    """Ends it at once, as a crash does."""
    self.process.kill()
    self.process.wait()


@contextmanager
def running_master(
  lease_s: float = 10.0,
  client_ttl_s: int = 10,
  ready_s: float = READY_S,
  port: int = 0,
) -> Iterator[Server]:
  """A master.

  Args:
    lease_s: how long a read or a look-up holds a block.
    client_ttl_s: a member not heard of for so long is gone, with its memory.
    port: that it listens at; 0 is a free one.

  Raises:
    OSError: it can't start or is not ready in `ready_s`; one line says why.
  """

  def arguments(port: int) -> list[str]:
    return [
      f'--rpc_address={HOST}',
      f'--rpc_port={port}',
      f'--metrics_host={HOST}',
      f'--metrics_port={free_port()}',
      f'--default_kv_lease_ttl={lease_s * 1e3:.0f}',
      f'--client_ttl={client_ttl_s}',
    ]

  with _running('mooncake_master', arguments, ready_s, port) as server:
    yield server


@contextmanager
def running_storage(
  master: str, num_bytes: int, ready_s: float = READY_S
) -> Iterator[Server]:
  """A member that lends memory, and shares it with clients on this host.

  Raises:
    OSError: see `running_master`.
  """

  def arguments(port: int) -> list[str]:
    return [
      f'--host={HOST}',
      f'--port={port}',
      f'--global_segment_size={num_bytes}',
      f'--master_server_address={master}',
      '--metadata_server=P2PHANDSHAKE',
    ]

  with _running('mooncake_client', arguments, ready_s) as server:
    yield server


def binary(name: str) -> Path:
  """Where the wheel has a program; OSError if it is not installed."""
  spec = importlib.util.find_spec('mooncake')
  for folder in (spec and spec.submodule_search_locations) or ():
    if (path := Path(folder) / name).exists():
      path.chmod(path.stat().st_mode | 0o111)
      return path
  raise OSError(f'{name} is not installed: {EXTRA}; on Debian also {LIBRARIES}')


def free_port() -> int:
  """A TCP port of loopback that nobody has now."""
  with socket.socket() as probe:
    probe.bind((HOST, 0))
    return probe.getsockname()[1]


@contextmanager
def _running(
  name: str, arguments, ready_s: float, fixed_port: int = 0
) -> Iterator[Server]:
  path = binary(name)
  until_s = time.monotonic() + ready_s
  with tempfile.NamedTemporaryFile('w+', prefix=f'{name}.') as log:
    for tries_left in reversed(range(TRIES)):
      port = fixed_port or free_port()
      process = subprocess.Popen(
        [str(path), *arguments(port)], stdout=log, stderr=log
      )
      try:
        if _is_ready(process, port, until_s):
          yield Server(process, f'{HOST}:{port}')
          return
      finally:
        _stop(process)
      if not tries_left or time.monotonic() >= until_s:
        raise OSError(_why(name, Path(log.name).read_text(), ready_s))


def _is_ready(process: subprocess.Popen, port: int, until_s: float) -> bool:
  """Waits until it listens; False if it ended or the time is over."""
  while process.poll() is None and time.monotonic() < until_s:
    try:
      socket.create_connection((HOST, port), 0.5).close()
      return True
    except OSError:
      time.sleep(0.02)
  return False


def _stop(process: subprocess.Popen) -> None:
  process.terminate()
  try:
    process.wait(STOP_S)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()


def _why(name: str, log: str, ready_s: float) -> str:
  """One line out of the log of a program that did not start."""
  missing = re.search(r'shared libraries: (\S+?):', log)
  if missing:
    library = missing[1]
    return f'{name} needs {library}, which is missing; on Debian: {LIBRARIES}'
  errors = [line for line in log.splitlines() if re.match(r'[EF]\d{4} ', line)]
  last = errors[-1] if errors else f'not ready in {ready_s} s'
  return f'{name} did not start: {last}'


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=str(__doc__).split('\n')[0])
  parser.add_argument(
    '--storage_mib', type=int, default=0, help='memory of a storage process'
  )
  parser.add_argument('--lease_s', type=float, default=10.0)
  args = parser.parse_args(argv)
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with ExitStack() as stack:
    try:
      master = stack.enter_context(running_master(args.lease_s))
      pid = master.process.pid
      print(f'master {master.address} {pid=}', flush=True)
      if args.storage_mib:
        storage = stack.enter_context(
          running_storage(master.address, args.storage_mib << 20)
        )
        print(
          f'storage {storage.address} pid {storage.process.pid}', flush=True
        )
      master.process.wait()
      print('the master ended', file=sys.stderr)
    except KeyboardInterrupt:
      return 0
    except OSError as error:
      print(f'error: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
  sys.exit(main())
