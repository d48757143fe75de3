# SPDX-License-Identifier: Apache-2.0
"""A transfer in legs, one for each instance that has a part in it.

An op within an instance is one op there. One between two is two ops of one
number: out of its source into a wire, where its source is, and out of what
arrives into its destination. Pages go in as many ops as they are copied in.
Blocks of a store that no instance owns are one op at whoever has the other end.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

from mooncake_jax.backend import BlockOps
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.blocks.segments import WIRE
from mooncake_jax.blocks.segments import wire_segment
from mooncake_jax.transfer.page_copies import split_pages


@dataclass
class Leg:
  """What one instance does of a transfer.

  Attributes:
    of: which op of the transfer each of `ops` is of; None is each its own.
    numbers: what others send it.
    only_receives: it begins nothing itself.
  """

  ops: Sequence[TransferOp]
  of: list[int] | None = None
  numbers: list[int] = field(default_factory=list)
  only_receives: bool = True

  @property
  def only_sends(self) -> bool:
    """Whether no op ends here."""
    if isinstance(self.ops, BlockOps):
      return False
    return all(sent_as(op) is not None for op in self.ops)


def sent_as(op: TransferOp) -> int | None:
  """The number under which a leg's op goes to another instance, if it does."""
  dst = op.dst
  is_sent = isinstance(dst, Replica) and dst.segment.endswith(WIRE)
  return dst.replica_id if is_sent else None  # pyright: ignore


def comes_as(op: TransferOp) -> int | None:
  """The number under which another instance sends it, if one does."""
  src = op.src
  is_sent = isinstance(src, Replica) and src.segment == ARRIVALS
  return src.replica_id if is_sent else None  # pyright: ignore


def place(side: DevicePages | Replica) -> str:
  """The instance whose memory it is."""
  return side.instance if isinstance(side, DevicePages) else owner(side.segment)


def by_instance(
  replicas: Sequence[Replica], sharing: Sequence[str]
) -> dict[str, list[Replica]]:
  """Replicas by who may have put or read them there.

  Args:
    sharing: the instances that use the store of all.
  """
  found: dict[str, list[Replica]] = {}
  for replica in replicas:
    name = owner(replica.segment)
    for each in sharing if name == REMOTE else (name,):
      found.setdefault(each, []).append(replica)
  return found


def legs_of(
  ops: Sequence[TransferOp],
  numbers: Iterator[int],
  copy_sizes: tuple[int, ...],
) -> dict[str, Leg]:
  """The legs of a transfer, by instance; at least one where there are ops.

  Args:
    numbers: which nobody had before.
    copy_sizes: numbers of pages that are copied at once; has 1.
  """
  if isinstance(ops, BlockOps):
    home = ops.pages.instance
    if ops.segments and {*map(owner, ops.segments)} <= {home, REMOTE}:
      return {home: Leg(ops, only_receives=False)}
  legs: dict[str, tuple[list[TransferOp], Leg]] = {}

  def add(instance: str, op: TransferOp, index: int) -> Leg:
    if instance not in legs:
      made: list[TransferOp] = []
      legs[instance] = made, Leg(made, [])
    some, leg = legs[instance]
    some.append(op)
    assert leg.of is not None
    leg.of.append(index)
    return leg

  for index, op in enumerate(ops):
    source, target = place(op.src), place(op.dst)
    if source == target or REMOTE in (source, target):
      home = target if source == REMOTE else source
      add(home, op, index).only_receives = False
      continue
    for piece in _pieces(op, copy_sizes):
      number = next(numbers)
      out = Replica(wire_segment(target), number, b'')
      come = Replica(ARRIVALS, number, b'')
      add(source, piece._replace(dst=out), index).only_receives = False
      add(target, piece._replace(src=come), index).numbers.append(number)
  return {instance: leg for instance, (_, leg) in legs.items()}


def _pieces(
  op: TransferOp, copy_sizes: tuple[int, ...]
) -> Iterator[TransferOp]:
  """The op, cut where pages go to pages; a block is copied as it is."""
  src, dst = op.src, op.dst
  if not (isinstance(src, DevicePages) and isinstance(dst, DevicePages)):
    yield op
    return
  count = len(src.pages)
  if len(dst.pages) != count:
    raise ValueError(f'{count} pages to {len(dst.pages)}')
  for piece in split_pages(count, copy_sizes):
    some = src.pages[piece]
    yield op._replace(
      src=src._replace(pages=some),
      dst=dst._replace(pages=dst.pages[piece]),
      num_bytes=op.num_bytes * len(some) // count,
    )


def worst(statuses: Sequence[Status]) -> Status:
  """What becomes of an op whose pieces ended so."""
  for status in statuses:
    if status != 'completed':
      return status
  return 'completed'
