# SPDX-License-Identifier: Apache-2.0
"""What the Master answers: values, never its own objects."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal
from typing import NamedTuple

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey

# Why a put got no replica: the segment is full of blocks that may not go;
# room is coming, once offloads have ended; the tenant is over its quota; the
# segment is leaving.
Refusal = Literal['', 'room', 'offload', 'quota', 'draining']
Pin = Literal['none', 'soft', 'hard']


class Evicted(NamedTuple):
  """A replica that is gone; its bytes are to be dropped.

  `was_published`: readers could find it, so they are to be told.
  """

  key: BlockKey
  replica: Replica
  was_published: bool = True


_new_evicted = partial(tuple.__new__, Evicted)


def evicted_of(
  replicas: Sequence[Replica], was_published: bool
) -> list[Evicted]:
  """One each."""
  keys = [replica.key for replica in replicas]
  return [*map(_new_evicted, zip(keys, replicas, repeat(was_published)))]


class PutStart(NamedTuple):
  """What put_start decided.

  Attributes:
    replica: where to write; None where nothing is to be written.
    stored: the segment holds the block already, or another put of it is
      under way (a duplicate put succeeds and keeps the old value). Neither:
      `refusal` says why.
    evicted: replicas that went to make room.
  """

  replica: Replica | None = None
  stored: bool = False
  evicted: tuple[Evicted, ...] = ()
  refusal: Refusal = 'room'


class PutChain(NamedTuple):
  """What put_start_chain decided for blocks [first, stop) of a chain.

  Attributes:
    stop: the first block that got no place, for the reason `refusal`; the
      end of what was asked where all have one.
    replicas: where to write, in chain order.
    indices: of the blocks in the chain that `replicas` belong to; the others
      of [first, stop) were stored already.
    evicted: replicas that went to make room.
  """

  stop: int
  replicas: tuple[Replica, ...] = ()
  indices: tuple[int, ...] = ()
  evicted: tuple[Evicted, ...] = ()
  refusal: Refusal = ''


@dataclass(frozen=True)
class CopyTask:
  """Bytes to be copied from `src` to `dst`; ends by copy_end or copy_revoke.

  Attributes:
    kind: 'move' takes the source away afterwards, 'offload' lets it go when
      room is needed.
  """

  kind: Literal['copy', 'move', 'offload']
  src: Replica
  dst: Replica
  size_bytes: int


@dataclass(frozen=True)
class CopyStart:
  """What copy_start decided.

  Attributes:
    task: None where there is nothing to copy: `stored` if the destination
      has the block, 'source' if the source has no readable copy of it, and
      else as PutStart.
  """

  task: CopyTask | None = None
  stored: bool = False
  evicted: tuple[Evicted, ...] = ()
  refusal: Refusal | Literal['source'] = 'room'


@dataclass(frozen=True)
class CopyEnd:
  """Whether the copy was published, and replicas that are to be dropped."""

  published: bool
  evicted: tuple[Evicted, ...] = ()


class Wanting(NamedTuple):
  """A block that has fewer readable replicas than it had before a loss."""

  key: BlockKey
  heat: int
  num_replicas: int
  num_wanted: int


@dataclass(frozen=True)
class Victims:
  """Offloads to carry out, and replicas that went below to make room."""

  tasks: tuple[CopyTask, ...] = ()
  evicted: tuple[Evicted, ...] = ()


@dataclass(frozen=True)
class Departed:
  """What went with a segment.

  Attributes:
    lost: keys that no segment can serve any more.
    kept: keys that others still serve.
    evicted: replicas whose bytes are to be dropped, where they are not gone
      with the segment.
    waiting: copies that stay until their reads or writes ended; `reap` tells
      of them.
  """

  lost: tuple[BlockKey, ...] = ()
  kept: tuple[BlockKey, ...] = ()
  evicted: tuple[Evicted, ...] = ()
  waiting: int = 0


@dataclass(frozen=True)
class Removed:
  """What a removal by pattern took, and keys it was refused, being in use."""

  evicted: tuple[Evicted, ...] = ()
  refused: tuple[BlockKey, ...] = ()
