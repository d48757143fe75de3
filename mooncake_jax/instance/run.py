# SPDX-License-Identifier: Apache-2.0
"""One try of one request inside the cluster, and what its steps cause.

Instances are state machines: their methods change a `Run` and return effects,
in order, which the cluster carries out. No method waits.
"""

from dataclasses import dataclass
from dataclasses import field
from typing import Literal

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.events import Event
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.store.outcomes import CopyTask

RunKey = tuple[str, int]
State = Literal[
  'queued', 'fetching', 'prefilling', 'transferring', 'decoding', 'ended'
]


@dataclass(eq=False)
class Run:
  """Where a try stands. Its pages are its own until no work uses them.

  Attributes:
    state: what it waits for; 'ended' once its last event was emitted.
    decode_pages: reserved before prefill starts, so KVCache has a place.
    prefill_uses, decode_uses: works under way that touch those pages.
    is_probing: a store is being asked for its blocks; it queues until then.
    works: its works under way, in the order they were started.
    turn: counts the instance's runs as they left its queue.
    prefix: replicas of the leading blocks, to be read or read already.
    loaded_blocks: of them, those that lie in the pages for sure.
    shared: of them, those whose pages are the device cache's.
    num_fetches: reads of the prefix that were started.
    ahead: the read or chunk under way that its next chunk follows.
    next_start: prompt tokens [0, next_start) are there, on their way, or
      dispatched.
    stops: where its chunks behind that end.
    computed_tokens: [0, computed) have their KVCache on the device.
    stored_blocks, handed_pages: given to the store, to decode, from 0.
    handoffs_open: handoff works under way.
    prefill_start_s, prefill_stop_s: when the first chunk began and the last
      one ended, so far; prefill_s: how long any ran.
    num_emitted, last_token: of the output.
  """

  request: Request
  placement: Placement
  state: State = 'queued'
  prefill_pages: tuple[int, ...] = ()
  decode_pages: tuple[int, ...] = ()
  prefill_uses: int = 0
  decode_uses: int = 0
  is_probing: bool = False
  works: 'dict[Work, None]' = field(default_factory=dict)
  prefix: tuple[Replica, ...] = ()
  left_queue_s: float = 0.0
  turn: int = 0
  loaded_blocks: int = 0
  shared: tuple[Replica, ...] = ()
  num_fetches: int = 0
  ahead: 'Work | None' = None
  next_start: int = 0
  stops: tuple[int, ...] = ()
  computed_tokens: int = 0
  stored_blocks: int = 0
  handed_pages: int = 0
  handoffs_open: int = 0
  prefill_start_s: float | None = None
  prefill_stop_s: float = 0.0
  prefill_s: float = 0.0
  num_emitted: int = 0
  last_token: int | None = None

  @property
  def key(self) -> RunKey:
    return self.request.request_id, self.placement.attempt

  @property
  def ended(self) -> bool:
    return self.state == 'ended'

  @property
  def num_tokens(self) -> int:
    """Tokens whose KVCache the decode instance must be able to hold."""
    return self.request.num_prompt_tokens + self.request.max_output_tokens - 1

  def loaded_tokens(self, layout: KVLayout) -> int:
    """Prompt tokens that were not computed."""
    return self.loaded_blocks * layout.block_size_tokens

  def ran(self, started_s: float, stopped_s: float) -> None:
    """A chunk ran; those of a pipeline overlap, which counts once."""
    if self.prefill_start_s is None:
      self.prefill_start_s = started_s
    self.prefill_s += stopped_s - max(started_s, self.prefill_stop_s)
    self.prefill_stop_s = stopped_s

  @property
  def prefilled(self) -> bool:
    return self.computed_tokens == self.request.num_prompt_tokens


@dataclass(frozen=True)
class Probe:
  """Asks a store that no instance owns for a chain's blocks from one on."""

  segment: str
  keys: tuple[BlockKey, ...]


WorkStep = Literal[
  'probe', 'fetch', 'chunk', 'put', 'handoff', 'decode', 'copy'
]
Payload = Probe | PrefillChunk | DecodeBatch | tuple[TransferOp, ...]


@dataclass(eq=False)
class Work:
  """Work of an instance at the backend.

  Attributes:
    run: whose it is; None for a decode batch or copies.
    held: the replicas that a fetch reads or a put writes.
    tasks: the copies between segments that it makes.
    after: works that it follows layer by layer.
    is_void: it follows a read that brought less than it should: nothing that
      it made counts.
  """

  step: WorkStep
  instance: str
  payload: Payload
  run: Run | None = None
  held: tuple[Replica, ...] = ()
  tasks: tuple[CopyTask, ...] = ()
  after: 'tuple[Work, ...]' = ()
  is_void: bool = False
  work_id: int | None = None


@dataclass(frozen=True)
class Start:
  """Start this work at the backend."""

  work: Work


@dataclass(frozen=True)
class Stop:
  """Cancel this work; its completion still comes."""

  work: Work


@dataclass(frozen=True)
class Drop:
  """Forget the bytes of these replicas."""

  replicas: tuple[Replica, ...]


Effect = Event | Start | Stop | Drop
Effects = list[Effect]


# Works that touch the (prefill, decode) pages of their run. A decode batch
# counts its rows itself.
TOUCHES: dict[WorkStep, tuple[int, int]] = {
  'probe': (0, 0),
  'fetch': (1, 0),
  'chunk': (1, 0),
  'put': (1, 0),
  'handoff': (1, 1),
}


def count_uses(work: Work, sign: int) -> None:
  """Adds (sign 1) or removes (-1) a work's uses of its run's pages."""
  if work.run is not None:
    prefill, decode = TOUCHES[work.step]
    work.run.prefill_uses += sign * prefill
    work.run.decode_uses += sign * decode


def failed(completion: Completion) -> str:
  """Why a work brought nothing; '' if it completed."""
  if completion.status == 'completed':
    return ''
  return completion.error or completion.status
