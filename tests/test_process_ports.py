# SPDX-License-Identifier: Apache-2.0
"""What processes of a cluster open to others, and what they make of bytes."""

import ast
import importlib.util
import os
from pathlib import Path
import socket

import pytest

from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.sim_landing import SimLanding
from mooncake_jax.distributed.spec import WireSpec

PACKAGE = Path(__file__).resolve().parents[1] / 'mooncake_jax'
# They run what they read.
UNSAFE = {'pickle', 'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve'}
LISTENS = '0A'  # a state in /proc/net/tcp
HERE = '127.0.0.1'


def listening() -> set[tuple[str, int]]:
  """Addresses and ports at which this process waits for others."""
  folder = Path(f'/proc/{os.getpid()}/fd')
  own = {os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
  found = set()
  for name, family in (('tcp', socket.AF_INET), ('tcp6', socket.AF_INET6)):
    for line in Path(f'/proc/net/{name}').read_text().splitlines()[1:]:
      fields = line.split()
      if fields[3] == LISTENS and f'socket:[{fields[9]}]' in own:
        host, port = fields[1].split(':')
        words = [host[i : i + 8] for i in range(0, len(host), 8)]
        raw = b''.join(bytes.fromhex(word)[::-1] for word in words)
        found.add((socket.inet_ntop(family, raw), int(port, 16)))
  return found


def test_what_listens_is_seen():
  before = listening()
  with socket.create_server(('0.0.0.0', 0)) as server:
    assert listening() - before == {server.getsockname()}


@pytest.mark.parametrize('name', ['tcp', 'jax', 'nixl'])
def test_movers_listen_where_they_are_told(name):
  if name == 'nixl' and importlib.util.find_spec('nixl_cu12') is None:
    pytest.skip('NIXL is not installed')
  before = listening()
  mover = make_mover(name, f'ports-{os.getpid()}', 'lo', HERE)
  inlet, outlet = mover.inlet(), mover.outlet()
  opened = {host for host, _ in listening() - before}
  for each in (inlet, outlet, mover):
    each.close()
  assert opened <= {HERE}


def test_simulated_instances_listen_where_they_are_told():
  before = listening()
  landing = SimLanding(WireSpec('tcp'), 'secret', lambda numbers: None)
  assert listening() - before == {landing.address}
  assert landing.address[0] == HERE
  landing.close()
  assert listening() == before


def test_nothing_that_is_read_can_run_code():
  """Ray's own channel aside, which asks for the token."""
  for path in PACKAGE.glob('**/*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        assert not {a.name for a in node.names} & UNSAFE, path
      elif isinstance(node, ast.ImportFrom):
        assert node.module not in UNSAFE, path
      elif isinstance(node, ast.keyword):
        assert node.arg != 'allow_pickle' or not ast.literal_eval(node.value)
