# SPDX-License-Identifier: Apache-2.0
"""Hosts on this machine: network namespaces joined by cables and a switch.

A host has one interface, `eth0`, and loopback. Its cable carries so many bits
a second each way (`tc tbf`) and loses a share of what comes (nftables), as
set and changed at any time. All is removed at the end; what a killed process
left behind, by the next one. Takes root, `ip`, `tc` and `nft`.

To be on a host is a thread's matter: sockets that a thread opens are where it
is, and so are threads and processes that it starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import ExitStack
import ctypes
from dataclasses import dataclass
from functools import cache
import itertools
import os
from pathlib import Path
import shutil
import subprocess

PREFIX = 'mooncake'
NAMESPACES = Path('/run/netns')
DEVICE = 'eth0'
SUBNET = '10.213.77.'  # that no packet leaves: the switch leads nowhere else
TOOLS = ('ip', 'tc', 'nft')
CLONE_NEWNET = 0x40000000  # sched.h
# What goes at once over an idle cable, and how long what is too much waits.
BURST_BYTES, QUEUE_S = 72 << 10, 0.05
IN_10000 = 10_000
_numbers = itertools.count()


@cache
def why_not() -> str:
  """Why there can be no such hosts here; '' if there can."""
  if os.geteuid() != 0:
    return 'network namespaces take root'
  if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
    return f'not installed: {", ".join(lacking)}'
  try:
    with hosts(1) as (host,):
      host.lose(0.5)
  except RuntimeError as error:
    return str(error)
  return ''


@dataclass(frozen=True)
class Host:
  """A namespace with an address, at the other end of a port of the switch."""

  name: str
  address: str
  switch: str
  port: str

  @contextmanager
  def inside(self) -> Iterator[None]:
    """The calling thread is on this host."""
    before = os.open('/proc/thread-self/ns/net', os.O_RDONLY)
    try:
      self.enter()
      yield
    finally:
      _enter(before)

  def command(self, *words: str) -> list[str]:
    """What starts a program on this host."""
    return ['ip', 'netns', 'exec', self.name, *words]

  def enter(self) -> None:
    """The calling thread is on this host from now on."""
    _enter(os.open(NAMESPACES / self.name, os.O_RDONLY))

  def limit(self, bits_per_s: float) -> None:
    """The cable is so fast from now on, each way."""
    shape = f'tbf rate {bits_per_s:.0f}bit burst {BURST_BYTES} latency '
    for namespace, device in self._ends:
      _run(
        *('tc', '-n', namespace, 'qdisc', 'replace', 'dev', device, 'root'),
        *f'{shape}{QUEUE_S:g}s'.split(),
      )

  def lose(self, share: float) -> None:
    """Of packets so many are lost from now on, each way; 1 is a cut cable.

    They have the size they would have on a wire: without loss the kernel
    moves up to 64 KiB as one, to spare processors.
    """
    if not 0 <= share <= 1:
      raise ValueError(f'{share=} must be in [0, 1]')
    segments = 1 if share else 65535
    some = f'numgen random mod {IN_10000} < {round(share * IN_10000)}'
    for namespace, device in self._ends:
      packets = ('gso_max_segs', str(segments))
      _run('ip', '-n', namespace, 'link', 'set', device, *packets)
      rules = f"""
        table netdev cable
        delete table netdev cable
        table netdev cable {{
          chain arriving {{
            type filter hook ingress device "{device}" priority 0;
            {some if share < 1 else ''} drop
          }}
        }}
      """
      _run(*f'ip netns exec {namespace} nft -f -'.split(), text=rules)

  @property
  def _ends(self) -> tuple[tuple[str, str], ...]:
    return (self.name, DEVICE), (self.switch, self.port)


@contextmanager
def hosts(count: int, bits_per_s: float = 1e9) -> Iterator[list[Host]]:
  """So many hosts, each of which reaches all others.

  Raises:
    RuntimeError: they can't be made; see `why_not`.
  """
  _sweep()
  with ExitStack() as stack:
    switch = stack.enter_context(_namespace('switch'))
    _run(*f'ip -n {switch} link add switch type bridge'.split())
    _run(*f'ip -n {switch} link set switch up'.split())
    made = []
    for number in range(count):
      name = stack.enter_context(_namespace(f'host{number}'))
      host = Host(name, f'{SUBNET}{number + 1}', switch, f'port{number}')
      _plug_in(host)
      host.limit(bits_per_s)
      made.append(host)
    yield made


def _plug_in(host: Host) -> None:
  for command in (
    f'link add {host.port} netns {host.switch} type veth peer name {DEVICE}'
    f' netns {host.name}',
    f'-n {host.switch} link set {host.port} master switch up',
    f'-n {host.name} addr add {host.address}/24 dev {DEVICE}',
    f'-n {host.name} link set {DEVICE} up',
    f'-n {host.name} link set lo up',
  ):
    _run('ip', *command.split())


@contextmanager
def _namespace(what: str) -> Iterator[str]:
  name = f'{PREFIX}-{os.getpid()}-{next(_numbers)}-{what}'
  _run('ip', 'netns', 'add', name)
  try:
    yield name
  finally:
    _run('ip', 'netns', 'delete', name)


def _sweep() -> None:
  """Removes what processes that are no more left behind."""
  for path in NAMESPACES.glob(f'{PREFIX}-*-*'):
    if not Path('/proc', path.name.split('-')[1]).exists():
      _run('ip', 'netns', 'delete', path.name)


def _enter(namespace: int) -> None:
  """Brings the thread into a namespace, an open file, and closes that."""
  libc = ctypes.CDLL(None, use_errno=True)
  failed = libc.setns(namespace, CLONE_NEWNET)
  os.close(namespace)
  if failed:
    raise OSError(ctypes.get_errno(), 'setns')


def _run(*command: str, text: str = '') -> None:
  ran = subprocess.run(command, input=text, text=True, capture_output=True)
  if ran.returncode:
    raise RuntimeError(f'{" ".join(command)}: {ran.stderr.strip()}')
