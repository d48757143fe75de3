# SPDX-License-Identifier: Apache-2.0
"""One try of one request inside the cluster, and what its steps cause.

Instances are state machines: their methods change a `Run` and return effects,
in order, which the cluster carries out. No method waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import final
from typing import Literal
from typing import NamedTuple

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.events import Event
from mooncake_jax.instance.outputs import chain_keys
from mooncake_jax.instance.outputs import text_of
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.request import TryKey
from mooncake_jax.store.outcomes import CopyTask

RunKey = TryKey
State = Literal[
  'queued',
  'fetching',
  'prefilling',
  'transferring',
  'decoding',
  'preempted',
  'ended',
]


@dataclass(eq=False, slots=True)
class Run:
  """Where a try stands. Its pages are its own until no work uses them.

  One that is preempted goes on as another run of the same key (`next_leg`),
  whose prompt is the first one's and what was emitted.

  Attributes:
    state: what it waits for; 'preempted' while its blocks are put to the
      store, 'ended' once its last event was emitted.
    num_before: output tokens that are part of the prompt.
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
    key: names the try.
    num_emitted, last_token, output: of what was emitted since the prompt; the
      tokens where they are known.
  """

  request: Request
  placement: Placement
  num_before: int = 0
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
  output: list[int] = field(default_factory=list)
  key: RunKey = field(init=False)

  def __post_init__(self):
    self.key = self.request.request_id, self.placement.attempt

  @property
  def ended(self) -> bool:
    return self.state == 'ended'

  @property
  def has_left(self) -> bool:
    """Whether it does not need its pages any more."""
    state = self.state
    return state == 'ended' or state == 'preempted'

  @property
  def may_give_pages(self) -> bool:
    """Whether it may have pages that it does not need any more."""
    state = self.state
    if state == 'ended' or state == 'preempted':
      return True
    return self.prefilled and len(self.prefill_pages) > 0

  @property
  def names_output(self) -> bool:
    """Whether others may come with the keys of its output's blocks."""
    is_known = self.request.prompt is not None and len(self.output) > 0
    return is_known or len(self.request.output_block_keys) > 0

  @property
  def has_emitted_all(self) -> bool:
    """Whether it came to its length, or to a stop token."""
    request = self.request
    return (
      self.num_emitted >= request.max_output_tokens
      or self.last_token in request.stop_token_ids
    )

  @property
  def num_output_tokens(self) -> int:
    return self.num_before + self.num_emitted

  @property
  def context_tokens(self) -> int:
    """Prompt and output; the KVCache of the last one is not there yet."""
    return self.request.num_prompt_tokens + self.num_emitted

  @property
  def num_tokens(self) -> int:
    """Tokens whose KVCache the decode instance must be able to hold."""
    return self.request.num_prompt_tokens + self.request.max_output_tokens - 1

  def loaded_tokens(self, layout: KVLayout) -> int:
    """Prompt tokens that were not computed."""
    return self.loaded_blocks * layout.block_size_tokens

  def own_tokens(self, layout: KVLayout) -> int:
    """Prompt tokens that it computed so far."""
    return max(self.computed_tokens - self.loaded_tokens(layout), 0)

  def ran(self, started_s: float, stopped_s: float) -> None:
    """A chunk ran; those of a pipeline overlap, which counts once."""
    if self.prefill_start_s is None:
      self.prefill_start_s = started_s
    self.prefill_s += stopped_s - max(started_s, self.prefill_stop_s)
    self.prefill_stop_s = stopped_s

  @property
  def prefilled(self) -> bool:
    return self.computed_tokens == self.request.num_prompt_tokens

  def next_leg(self, block_size_tokens: int) -> 'Run':
    """The run that goes on from what was emitted so far."""
    request, total = self.request, self.context_tokens
    keys = chain_keys(request, self.output, total, block_size_tokens)
    num_new = len(keys) - len(request.block_keys)
    request = replace(
      request,
      num_prompt_tokens=total,
      max_output_tokens=request.max_output_tokens - self.num_emitted,
      block_keys=keys,
      output_block_keys=request.output_block_keys[num_new:],
      prompt=text_of(request, self.output),
    )
    # Its blocks may have gone anywhere meanwhile.
    plan = replace(
      self.placement, local_blocks=0, fetch_blocks=len(keys), fetch_from=None
    )
    return Run(request, plan, self.num_output_tokens)


@dataclass(frozen=True)
class Probe:
  """Asks a store that no instance owns for a chain's blocks from one on."""

  segment: str
  keys: tuple[BlockKey, ...]


WorkStep = Literal[
  'probe',
  'fetch',
  'chunk',
  'put',
  'handoff',
  'decode',
  'put_output',
  'copy',
]
Payload = Probe | PrefillChunk | DecodeBatch | Sequence[TransferOp]


@dataclass(eq=False, slots=True)
class Work:
  """Work of an instance at the backend.

  Attributes:
    run: whose it is; None for a decode batch or copies.
    step: 'put_output' puts from decode pages, on behalf of the prefill
      instance whose segment it is.
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


@final
class Start(NamedTuple):
  """Start this work at the backend."""

  work: Work


@final
class Stop(NamedTuple):
  """Cancel this work; its completion still comes."""

  work: Work


@final
class Drop(NamedTuple):
  """Forget the bytes of these replicas."""

  replicas: tuple[Replica, ...]


Effect = Event | Start | Stop | Drop
Effects = list[Effect]


# Works that touch the (prefill, decode) pages of their run. A decode batch
# counts its rows itself.
TOUCHES: dict[WorkStep, tuple[bool, bool]] = {
  'probe': (False, False),
  'fetch': (True, False),
  'chunk': (True, False),
  'put': (True, False),
  'handoff': (True, True),
  'put_output': (False, True),
}


def count_uses(work: Work, sign: int) -> None:
  """Adds (sign 1) or removes (-1) a work's uses of its run's pages."""
  run = work.run
  if run is not None:
    prefill, decode = TOUCHES[work.step]
    if prefill:
      run.prefill_uses += sign
    if decode:
      run.decode_uses += sign


def failed(completion: Completion) -> str:
  """Why a work brought nothing; '' if it completed."""
  if completion.status == 'completed':
    return ''
  return completion.error or completion.status
