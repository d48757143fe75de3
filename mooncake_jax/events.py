# SPDX-License-Identifier: Apache-2.0
"""What the cluster tells the Conductor and the records: frozen facts.

Every event of a request carries the `attempt` it belongs to; one of an old
attempt is dropped by whoever reads it.
"""

from dataclasses import dataclass
from dataclasses import field

from mooncake_jax.blocks.segments import Medium
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Emitted


@dataclass(frozen=True)
class BlocksStored:
  """Blocks became readable in `instance`'s segment of medium `tier`.

  `seq` counts the segment's store events, 1, 2, 3 …; None where nobody counts
  and events are heard in the order in which they happened.
  """

  time_s: float
  instance: str
  keys: tuple[BlockKey, ...]
  tier: Medium = 'host'
  seq: int | None = None


@dataclass(frozen=True)
class BlocksEvicted:
  """Blocks are no longer readable in `instance`'s segment."""

  time_s: float
  instance: str
  keys: tuple[BlockKey, ...]
  tier: Medium = 'host'
  seq: int | None = None


@dataclass(frozen=True)
class Inventory:
  """Exactly these blocks are readable in `instance`'s segment: none if it was
  cleared. `seq` is that of the last event that it includes.
  """

  time_s: float
  instance: str
  keys: tuple[BlockKey, ...]
  tier: Medium = 'host'
  seq: int | None = None


@dataclass(frozen=True)
class RequestEvent:
  """Base of all events of a request."""

  time_s: float
  request_id: str
  attempt: int
  instance: str


@dataclass(frozen=True)
class PrefixFetched(RequestEvent):
  """The reused prefix lies in the instance's device pages.

  `started_s` is when the request left the queue; the token counts say which
  tier each part came from and are 0 where nothing was reused; `remote` is
  another instance's memory, `store` the Mooncake Store.
  """

  started_s: float = 0.0
  device_tokens: int = 0
  local_tokens: int = 0
  ssd_tokens: int = 0
  remote_tokens: int = 0
  store_tokens: int = 0


@dataclass(frozen=True)
class PrefillDone(RequestEvent):
  """The prompt's last chunk ended and gave the first token.

  `started_s` is when the first chunk began to run; `prefill_s` the seconds
  its chunks ran.
  """

  started_s: float = 0.0
  computed_tokens: int = 0
  prefill_s: float = 0.0


@dataclass(frozen=True)
class KVArrived(RequestEvent):
  """All of the prompt's KVCache lies in the decode instance's pages."""


@dataclass(frozen=True)
class TokensEmitted:
  """New output tokens: of all rows of a decode step, or a first one.

  Of several requests, and so no event of one: `emitted.rows` has them one by
  one. `instance` is where they decode.
  """

  time_s: float
  instance: str
  emitted: Emitted


@dataclass(frozen=True)
class Preempted(RequestEvent):
  """The request lost its decode pages; it resumes from the store.

  `PrefixFetched`, `PrefillDone` and `KVArrived` come again, of a prompt that
  is the first one and what was emitted before.
  """


@dataclass(frozen=True)
class Stopped(RequestEvent):
  """Base of ends that may come in the middle of a prefill.

  `computed_tokens` and `prefill_s` are of its chunks that had ended, as in the
  `PrefillDone` that will not come; 0 where it came, or no chunk ended.
  """

  computed_tokens: int = field(default=0, kw_only=True)
  prefill_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Cancelled(Stopped):
  """Its client went away."""


@dataclass(frozen=True)
class RejectedLate(RequestEvent):
  """The decode instance refused after prefill; that work is wasted."""

  reason: str = 'tbt'
  wasted_s: float = 0.0


@dataclass(frozen=True)
class Finished(RequestEvent):
  """All output tokens were emitted."""

  num_output_tokens: int = 0


@dataclass(frozen=True)
class Failed(Stopped):
  """This try will not finish, for `reason`.

  `retryable`: `instance` is to blame, so another may still serve it.
  """

  reason: str = ''
  retryable: bool = False


@dataclass(frozen=True)
class WorkDone:
  """A chunk or a transfer of a request ended; what timelines are drawn from.

  It tells what the backend did, not how the request fares, so it may also
  come after the request's last event.

  Attributes:
    instance: that computed the chunk, or started the transfer.
    step: 'chunk', 'fetch', 'put', 'handoff' or 'put_output'.
    status: see `backend.Status`.
    spans: of a chunk, [start_s, stop_s) on each stage.
    start_token, stop_token: of the prompt, in a chunk.
    num_bytes: moved by a transfer.
  """

  time_s: float
  instance: str
  request_id: str
  attempt: int
  step: str
  status: str
  started_s: float
  spans: tuple[tuple[float, float], ...] = ()
  start_token: int = 0
  stop_token: int = 0
  num_bytes: int = 0


@dataclass(frozen=True)
class InstanceDraining:
  """It takes no new requests; `InstanceLost` follows when its runs ended."""

  time_s: float
  instance: str


@dataclass(frozen=True)
class InstanceLost:
  time_s: float
  instance: str


@dataclass(frozen=True)
class InstanceJoined:
  time_s: float
  instance: str
  role: str = 'prefill'


# The last events of a try.
ENDS = (Finished, Failed, Cancelled, RejectedLate)
StoreEvent = BlocksStored | BlocksEvicted | Inventory
# Which instances there are.
FleetEvent = InstanceDraining | InstanceLost | InstanceJoined
Event = StoreEvent | RequestEvent | TokensEmitted | WorkDone | FleetEvent
