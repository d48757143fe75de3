# SPDX-License-Identifier: Apache-2.0
"""Ops under way and the work they were submitted as.

The book (`book.py`) changes them, under its lock.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Literal

from mooncake_jax.backend import Status
from mooncake_jax.backend import TransferOp
from mooncake_jax.backend import WorkId

State = Literal[
  'WAITING', 'PENDING', 'COMPLETED', 'FAILED', 'TIMEOUT', 'CANCELED'
]
STATES: Mapping[Status, State] = {
  'completed': 'COMPLETED',
  'failed': 'FAILED',
  'timeout': 'TIMEOUT',
  'cancelled': 'CANCELED',
}


@dataclass(frozen=True)
class OpStatus:
  """How one op stands.

  Attributes:
    state: WAITING before its bytes are read, PENDING until it has ended.
    moved_bytes: readable at the destination by now.
    error: why, where it ended otherwise than COMPLETED.
  """

  state: State
  moved_bytes: int = 0
  error: str = ''

  @property
  def is_pending(self) -> bool:
    return self.state in ('WAITING', 'PENDING')


@dataclass(eq=False, slots=True)
class TransferWork:
  """Ops submitted together.

  Attributes:
    started_s: when the first bytes moved; None before.
    after: works that it depends on, layer by layer; whoever starts its ops
      sees to that.
    ops_completed: called with ops that completed, each once, before the work's
      end.
  """

  work_id: WorkId
  priority: int
  deadline_s: float
  runs: tuple['OpRun', ...] = ()
  started_s: float | None = None
  num_live: int = 0
  after: tuple[WorkId, ...] = ()
  ops_completed: Callable[[Sequence[TransferOp]], None] | None = None


@dataclass(eq=False, slots=True)
class OpRun:
  """One op on its way.

  Attributes:
    num_pieces: pieces still to arrive; set when it starts.
    moved_bytes: of the pieces that have arrived.
    places: what it writes, as the book names it.
    num_waits: earlier ops that must end first.
    is_started: it was handed on to be moved.
    is_moving: its bytes are read, so it can't be cancelled.
    dependents: later ops that wait for this one, and whether they read what
      it writes (so fail with it).
  """

  op: TransferOp
  work: TransferWork
  status: Status | None = None
  error: str = ''
  num_pieces: int = 0
  moved_bytes: int = 0
  places: tuple[object, ...] = ()
  num_waits: int = 0
  is_started: bool = False
  is_moving: bool = False
  dependents: list[tuple['OpRun', bool]] = field(default_factory=list)

  @property
  def is_live(self) -> bool:
    return self.status is None

  def snapshot(self) -> OpStatus:
    """How the op stands now. Any thread."""
    status, moved_bytes = self.status, self.moved_bytes
    if status is not None:
      return OpStatus(STATES[status], moved_bytes, self.error)
    return OpStatus('PENDING' if self.is_moving else 'WAITING', moved_bytes)
