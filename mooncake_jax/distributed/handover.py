# SPDX-License-Identifier: Apache-2.0
"""What one driver leaves to the next: the blocks of a worker's segments.

A block is written before its driver judges it: what was computed from a read
that brought too little is written and then revoked. So a block counts from
when its driver has told all that follows from the report of its end. The next
driver's Master gives it another number, under which it is read from then on.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import itertools
from typing import TYPE_CHECKING

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import medium
from mooncake_jax.request import BlockKey

if TYPE_CHECKING:  # which brings JAX
  from mooncake_jax.engine.device import DeviceBackend
  from mooncake_jax.transfer.far import SharedSegment

KEPT = ('host', 'ssd')  # media that a driver's end does not empty
Named = tuple[str, BlockKey]  # a segment and what lies there


class Estate:
  """Blocks of one worker. Its loop thread calls."""

  def __init__(
    self, backend: 'DeviceBackend', stores: Sequence['SharedSegment'] = ()
  ):
    """Starts with none; the backend has one instance, and uses the stores."""
    (self._name,) = backend.instances
    self._backend = backend
    self._stores = stores
    self._written: list[tuple[int, Sequence[Replica]]] = []
    self._published: dict[Named, Replica] = {}
    self._unclaimed: dict[Named, Replica] = {}
    self._ids = itertools.count(-1, -1)  # none that a Master gives
    self._looked_at: set[str] = set()

  def wrote(self, replicas: Sequence[Replica], report: int) -> None:
    """A transfer wrote them whole, which the report of that number tells."""
    if replicas:
      self._written.append((report, replicas))

  def settle(self, report: int) -> None:
    """The driver has told what follows from reports up to this one."""
    while self._written and self._written[0][0] <= report:
      _, replicas = self._written.pop(0)
      self._published |= {(r.segment, r.key): r for r in replicas}

  def forget(self, replicas: Iterable[Replica]) -> None:
    """They are dropped, published or not."""
    gone = {*replicas}
    self._claim(gone, ())
    self._written = [
      (report, [r for r in some if r not in gone])
      for report, some in self._written
    ]
    for replica in gone:
      if self._published.get((replica.segment, replica.key)) == replica:
        del self._published[replica.segment, replica.key]

  def hand_over(self) -> None:
    """Drops all but what was published, which waits for its next numbers."""
    self._written.clear()
    for store in self._stores:
      store.reset()
    olds = [*self._published.values()]
    kept = [r._replace(replica_id=next(self._ids)) for r in olds]
    self._backend.instances[self._name].keep_only(
      {
        old.replica_id: new.replica_id
        for old, new in zip(olds, kept)
        if medium(old.segment) == 'host'
      },
      {old.key for old in olds if medium(old.segment) == 'ssd'},
    )
    self._published = {(r.segment, r.key): r for r in kept}
    self._unclaimed = {**self._published}

  def blocks(self, segment: str) -> list[tuple[BlockKey, int]]:
    """See `Backend.adopt`: what was handed over of a segment.

    Or, when it is asked for the first time, what lies on the medium.
    """
    if segment not in self._looked_at:
      self._looked_at.add(segment)
      for key, _ in self._backend.adopt(segment):
        found = Replica(segment, next(self._ids), key)
        self._published[segment, key] = self._unclaimed[segment, key] = found
    size = self._backend.layout.block_bytes
    return [(key, size) for place, key in self._unclaimed if place == segment]

  def claim(self, ops: Sequence[TransferOp]) -> list[Replica]:
    """Replicas that ops name have these numbers from now on.

    One that is written anew is another: the old bytes go.

    Returns:
      Those that are written.
    """
    sources, targets = replicas_of(ops)
    self._claim(sources, targets)
    return targets

  def _claim(
    self, sources: Iterable[Replica], targets: Iterable[Replica]
  ) -> None:
    if not self._unclaimed:
      return
    host = self._backend.instances[self._name].segment
    for replica in targets:
      if old := self._unclaimed.pop((replica.segment, replica.key), None):
        self._backend.drop((old,))
        self.forget([old])
    for replica in sources:
      named = replica.segment, replica.key
      if old := self._unclaimed.pop(named, None):
        host.rename(old.replica_id, replica.replica_id)
        self._published[named] = replica


def replicas_of(
  ops: Sequence[TransferOp],
) -> tuple[list[Replica], list[Replica]]:
  """Those that a worker's own ops read, and those that they write."""
  if isinstance(ops, BlockOps):
    found = [*ops.replicas]
    return ([], found) if ops.are_puts else (found, [])
  sides = [op.src for op in ops], [op.dst for op in ops]
  sources, targets = (
    list(
      dict.fromkeys(
        side
        for side in some
        if isinstance(side, Replica) and medium(side.segment) in KEPT
      )
    )
    for some in sides
  )
  return sources, targets


class Heard:
  """Which reports a driver has acted on, and has told so."""

  def __init__(self):
    self._last: dict[str, int] = {}
    self._told: dict[str, int] = {}

  def report(self, name: str, number: int) -> None:
    """One came from an instance."""
    self._last[name] = number

  def lost(self, name: str) -> None:
    """Its next process begins anew."""
    self._last.pop(name, None)
    self._told.pop(name, None)

  def due(self, told: Collection[str] | None) -> Iterator[tuple[str, int]]:
    """What to tell of, to instances that are told something; None: to all."""
    for name, number in self._last.items():
      if self._told.get(name) != number and (told is None or name in told):
        self._told[name] = number
        yield name, number
