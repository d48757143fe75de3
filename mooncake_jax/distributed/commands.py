# SPDX-License-Identifier: Apache-2.0
"""What the driver tells a worker: the calls of `Backend`, as values.

A command that names works does so by the driver's numbers.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import NamedTuple

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import LinkUse
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId
from mooncake_jax.distributed.channel import Address
from mooncake_jax.request import BlockKey


@dataclass(slots=True)
class Prefill:
  work_id: WorkId
  chunk: PrefillChunk
  after: tuple[WorkId, ...]


@dataclass(slots=True)
class Decode:
  work_id: WorkId
  batch: DecodeBatch
  max_steps: int


@dataclass(slots=True)
class Transfer:
  """`ops` are those that begin, end or both at the worker's instance."""

  work_id: WorkId
  ops: Sequence[TransferOp]
  priority: int
  deadline_s: float
  after: tuple[WorkId, ...] = ()


@dataclass(slots=True)
class Probe:
  """Asks the store that all instances share."""

  work_id: WorkId
  segment: str
  keys: tuple[BlockKey, ...]
  deadline_s: float


@dataclass(slots=True)
class Cancel:
  work_id: WorkId


@dataclass(slots=True)
class Forget:
  """`Backend.drop`."""

  replicas: tuple[Replica, ...]


@dataclass(slots=True)
class Miss:
  """What other processes were to send under these numbers won't come."""

  numbers: tuple[int, ...]
  why: str


@dataclass(slots=True)
class Landed:
  """What other instances sent under these numbers is here; in simulations."""

  numbers: Sequence[int]


@dataclass(slots=True)
class Lead:
  """Where an instance listens from now on; None: it is gone."""

  instance: str
  address: Address | None


@dataclass(slots=True)
class RestartClock:
  """The run starts at this time on the driver's clock."""

  start_s: float


@dataclass(slots=True)
class Begin:
  """Parts of lower numbers were for an earlier process of this instance."""

  number: int


@dataclass(slots=True)
class Heard:
  """All that follows from reports up to this one was told."""

  report: int


@dataclass(slots=True)
class LetGo:
  """All works end: their driver is no more."""

  why: str


# What starts a work and ends with a completion.
Starting = Prefill | Decode | Transfer | Probe
Command = (
  Begin
  | Starting
  | Cancel
  | Forget
  | Miss
  | Landed
  | Lead
  | RestartClock
  | Heard
  | LetGo
)


@dataclass(slots=True)
class Report:
  """What a worker has to tell, in order; `error` ends it.

  Attributes:
    link_uses: what its links carried so far in the run that began at
      `start_s`; None is no run yet.
    number: of the reports of a process, in order.
    is_refused: another driver has taken over, and nothing is told to this one.
  """

  completions: list[Completion] = field(default_factory=list)
  error: str = ''
  link_uses: Mapping[tuple[str, str], LinkUse] = field(default_factory=dict)
  start_s: float | None = None
  number: int = 0
  is_refused: bool = False


class Holdings(NamedTuple):
  """Of one process, now.

  Attributes:
    num_works: under way.
    buffer_bytes: of transfers: arrived, staged or read, and not moved on.
    segment_bytes: of blocks, by its own segments.
    num_threads, num_arrays, rss_bytes: of the process; arrays on devices or
      pinned.
  """

  num_works: int
  buffer_bytes: int
  segment_bytes: dict[str, int]
  num_threads: int
  num_arrays: int
  rss_bytes: int
