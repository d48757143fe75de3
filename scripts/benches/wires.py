# SPDX-License-Identifier: Apache-2.0
"""KVCache between two processes: our wires against the bare ways under them.

As a program it is the other process: it sends parts over wires, as a worker's
links do, or lets the near end read its memory by NIXL and nothing else. All
blocks in turn lie elsewhere in memory, for KVCache is never in the cache.
"""

from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import ExitStack
from dataclasses import dataclass
import itertools
import json
import os
from pathlib import Path
import subprocess
import sys
import threading
import time
from typing import Any
from typing import get_args

import numpy as np

from mooncake_jax.backend import Replica
from mooncake_jax.costs.links import LinkSpeed
from mooncake_jax.distributed.landing import Landing
from mooncake_jax.distributed.mover import Mover
from mooncake_jax.distributed.movers import make_mover
from mooncake_jax.distributed.nixl_agent import NixlAgent
from mooncake_jax.distributed.offers import PartShape
from mooncake_jax.distributed.probe import measure_wire
from mooncake_jax.distributed.spec import MoverName
from mooncake_jax.distributed.spec import WireSpec
from mooncake_jax.distributed.wire import Wire
from mooncake_jax.engine.device import WIRE_LINES
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.entries import aligned
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.far import Item
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.far import JobLink
from mooncake_jax.transfer.host_memory import keep_freed_memory
from mooncake_jax.transfer.segment import Part
from scripts.benches.loopback import loopback
from scripts.benches.namespaces import DEVICE
from scripts.benches.namespaces import Host
from scripts.benches.rows import Row
from scripts.gin_source import ROOT

SIZES = (64 << 10, 1 << 20, 8 << 20)
MEMORY_BYTES = 128 << 20
SHAPE = PartShape(1, 8, 128, 1 << 16, np.dtype(np.float32))
TOKEN_BYTES = 2 * 8 * 128 * 4
DEVICES = 'lo'


@dataclass(frozen=True)
class Place:
  """Where the two ends are; None is here, over loopback."""

  near: Host | None = None
  far: Host | None = None

  def spec(self, mover: MoverName) -> WireSpec:
    if self.near is None:
      return WireSpec(mover, devices=DEVICES)
    # UCX would find that both ends are on one machine.
    return WireSpec(mover, bind=self.near.address, devices=DEVICE)

  @property
  def far_address(self) -> str:
    return '127.0.0.1' if self.far is None else self.far.address


HERE = Place()


def wires(quick: bool) -> list[Row]:
  """GB/s by way and size, and ours as a share of the bare way."""
  keep_freed_memory()  # as workers do
  turns = 15 if quick else 45
  rows = []
  ways: dict[MoverName, Any] = {'nixl': _bare_nixl, 'tcp': _bare_socket}
  for mover, bare in ways.items():
    for size in SIZES:
      with bare(size) as bare_s, ours(mover, size) as way:
        took = [(way.seconds(), bare_s()) for _ in range(turns)]
      rows += _rows(mover, size, took)
  return rows


def _rows(
  mover: str, size: int, took: list[tuple[float, float]]
) -> Iterator[Row]:
  name = f'wire.{mover}_{size >> 10}k'
  for way, seconds in zip(('', '_bare'), zip(*took)):
    yield Row(f'{name}{way}', size / min(seconds) / 1e9, 'GB/s')
  ours_s, bare_s = map(min, zip(*took))
  yield Row(
    f'{name}_share',
    bare_s / ours_s,
    'ratio',
    'bytes a second over those of the bare way, the best of turns each',
    0.8 if size >= 1 << 20 and mover == 'nixl' else None,
  )


def blocks(size: int) -> list[np.ndarray]:
  """Memory of one size, all of it touched."""
  count = max(MEMORY_BYTES // size, 1)
  found = [aligned(size) for _ in range(min(count, 256))]
  for i, block in enumerate(found):
    block[:] = i % 251
  return found


# The near end receives.


class Ours:
  """Wires that the other process sends over."""

  def __init__(self, ask: Callable[[dict[str, Any]], Any], arrivals: Arrivals):
    self._ask = ask
    self._arrivals = arrivals
    self._numbers = itertools.count()

  def seconds(self, count: int | None = None) -> float:
    """A part takes; so many are sent at once, or all of its memory."""
    number = next(self._numbers)
    self._arrivals.expect(number, lambda _, left: left(), _raise)
    return float(self._ask({'number': number, 'count': count})['seconds'])

  def measured(self) -> LinkSpeed:
    """As an instance measures it."""
    return LinkSpeed(*self._ask({'measure': True})['speed'])


@contextmanager
def ours(mover: MoverName, size: int, place: Place = HERE) -> Iterator[Ours]:
  """From the other process's memory into ours."""
  with ExitStack() as stack:
    if place.near is not None:
      stack.enter_context(place.near.inside())
    spec, made = place.spec(mover), _mover(mover, 'near', place)
    stack.callback(made.close)
    arrivals = Arrivals(MEMORY_BYTES)
    landing = Landing(spec, SHAPE, made, arrivals, 's')
    stack.callback(landing.close)
    host, port = landing.address
    words = 'send', mover, str(size), host, str(port), spec.devices
    words = *words, place.far_address
    way = Ours(stack.enter_context(_other(*words, on=place.far)), arrivals)
    way.seconds()
    yield way


@contextmanager
def _bare_nixl(size: int) -> Iterator[Any]:
  """Seconds a block, read by NIXL one after another into registered memory."""
  made = NixlAgent(_name('bare-near'), DEVICES)
  into = np.zeros(MEMORY_BYTES, np.uint8)
  handle = made.register([into])
  with _other('lie', str(size)) as ask:
    there = ask({})
    peer = made.meet(bytes.fromhex(there['agent']))
    places = there['places']

    def seconds() -> float:
      begun_s = time.perf_counter()
      for i, at in enumerate(places):
        to = into.ctypes.data + i * size
        _read(made, peer, at, to, size)
      return (time.perf_counter() - begun_s) / len(places)

    seconds()
    yield seconds
    made.part(peer)
  made.deregister(handle)
  made.close()


def _read(reader: NixlAgent, peer: str, at: int, to: int, size: int) -> None:
  agent = reader.agent
  here = agent.get_xfer_descs([(to, size, 0)], 'DRAM')
  there = agent.get_xfer_descs([(at, size, 0)], 'DRAM')
  xfer = agent.initialize_xfer('READ', here, there, peer)
  state = agent.transfer(xfer)
  while state == 'PROC':
    state = agent.check_xfer_state(xfer)
  assert state == 'DONE', state
  agent.release_xfer_handle(xfer)


@contextmanager
def _bare_socket(size: int) -> Iterator[Any]:
  """Seconds a block over one plain socket, one after another."""
  with loopback(size) as other:
    some = blocks(size)

    def seconds() -> float:
      begun_s = time.perf_counter()
      for block in some:
        other.get(block)
      return (time.perf_counter() - begun_s) / len(some)

    seconds()
    yield seconds


def _mover(name: MoverName, agent: str, place: Place = HERE) -> Mover:
  spec = place.spec(name)
  return make_mover(name, _name(agent), spec.devices, spec.bind)


def _name(agent: str) -> str:
  """One that no other agent has, or had."""
  return f'{agent}-{os.getpid()}-{time.time_ns()}'


def _raise(error: Exception) -> None:
  raise error


@contextmanager
def _other(*arguments: str, on: Host | None = None) -> Iterator[Any]:
  """The other process; what it yields asks it once and gives its answer."""
  module = f'scripts.benches.{Path(__file__).stem}'
  command = [sys.executable, '-m', module, *arguments]
  if on is not None:
    command = on.command(*command)
  with subprocess.Popen(
    command,
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:

    def ask(question: dict[str, Any]) -> dict[str, Any]:
      assert process.stdin and process.stdout
      process.stdin.write(json.dumps(question) + '\n')
      process.stdin.flush()
      return json.loads(process.stdout.readline())

    yield ask
    assert process.stdin
    process.stdin.close()
    process.wait(20)


# The far end sends.


def _send(
  mover: MoverName,
  size: int,
  address: tuple[str, int],
  devices: str,
  bind: str,
) -> None:
  """Answers questions with the seconds that a part took, or how fast it is."""
  spec = WireSpec(mover, devices=devices)
  made = make_mover(mover, f'far-{os.getpid()}', devices, bind)
  wire = Wire('near', spec, made, 's')
  wire.lead_to(address)
  shape = (1, 2, size // TOKEN_BYTES, 8, 128)
  parts = [
    Part(0, 1, (b.view(np.float32).reshape(shape),)) for b in blocks(size)
  ]
  cycle = itertools.cycle(parts)
  link = FarTier(wire, _crash, MEMORY_BYTES, WIRE_LINES).write_link
  for line in sys.stdin:
    question = json.loads(line)
    if question.get('measure'):
      _tell({'speed': measure_wire(wire, link, parts[0])})
      continue
    count = question['count'] or len(parts)
    some = [*itertools.islice(cycle, count)]
    replica = Replica(wire.name, question['number'], b'')
    begun_s = time.perf_counter()
    _send_all(link, [(replica, part) for part in some])
    _tell({'seconds': (time.perf_counter() - begun_s) / len(some)})


def _send_all(link: JobLink, items: list[Item]) -> None:
  done = threading.Semaphore(0)
  for item in items:
    job = Job(
      item[1].num_bytes,
      lambda: True,
      lambda: None,
      _raise,
      done.release,
      item,
    )
    link.submit(job, 0)
  for _ in items:
    assert done.acquire(timeout=30)


def _lie(size: int) -> None:
  """Registers memory and says where it is."""
  made = NixlAgent(_name('bare-far'), DEVICES)
  some = blocks(size)
  for block in some:
    made.register([block])
  threading.Thread(target=_progress, args=(made,), daemon=True).start()
  for _ in sys.stdin:
    agent = made.agent.get_agent_metadata().hex()
    _tell({'agent': agent, 'places': [b.ctypes.data for b in some]})


def _progress(agent: NixlAgent) -> None:
  """Lets others connect."""
  while True:
    agent.progress()
    time.sleep(1e-3)


def _tell(answer: dict[str, Any]) -> None:
  print(json.dumps(answer), flush=True)


def _crash(name: str, error: BaseException) -> None:
  print(f'{name}: {error!r}', file=sys.stderr)
  os._exit(1)


def main(what: str, *arguments: str) -> None:
  keep_freed_memory()
  if what == 'lie':
    _lie(int(arguments[0]))
  else:
    (mover,) = [name for name in get_args(MoverName) if name == arguments[0]]
    size, host, port, devices, bind = arguments[1:]
    _send(mover, int(size), (host, int(port)), devices, bind)


if __name__ == '__main__':
  main(*sys.argv[1:])
