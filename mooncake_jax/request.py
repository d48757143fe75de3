# SPDX-License-Identifier: Apache-2.0
"""What crosses borders: requests, placements and what became of them.

Intervals are half-open, in tokens. A time is `*_s`, in seconds from the start
of the run, on the backend's clock (virtual or wall).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
import math
from typing import Literal
from typing import NamedTuple

import numpy as np

BlockKey = bytes
# The request's id and the number of the try: names a run everywhere.
TryKey = tuple[str, int]
MAX_LOGPROBS = 20  # as OpenAI's API has it


@dataclass(frozen=True)
class Sampling:
  """How the next token is drawn; the defaults are greedy.

  Attributes:
    temperature: 0 takes the most likely token.
    top_k: draw among the k most likely tokens; 0 means all.
    top_p: draw among the most likely tokens whose mass reaches p.
    min_p: draw among tokens at least so likely as p times the likeliest one.
    seed: with the token's position, the only source of randomness.
    logprobs: tell each token's log probability and those of so many of the
      likeliest, at most 20; None tells nothing.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  logprobs: int | None = None

  def __post_init__(self):
    if self.temperature < 0:
      raise ValueError(f'Sampling.temperature={self.temperature} must be >= 0')
    if self.top_k < 0:
      raise ValueError(f'Sampling.top_k={self.top_k} must be >= 0')
    if not 0 < self.top_p <= 1:
      raise ValueError(f'Sampling.top_p={self.top_p} must be in (0, 1]')
    if not 0 <= self.min_p <= 1:
      raise ValueError(f'Sampling.min_p={self.min_p} must be in [0, 1]')
    if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
      raise ValueError(
        f'Sampling.logprobs={self.logprobs} must be in [0, {MAX_LOGPROBS}]'
      )


@dataclass(frozen=True)
class TokenLogprobs:
  """How likely an emitted token was, before temperature and cuts.

  Attributes:
    logprob: natural logarithm of the model's probability of the token.
    top: the likeliest tokens and theirs, in falling order.
  """

  logprob: float
  top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Request:
  """One request of a workload.

  Attributes:
    request_id: unique in a run.
    arrival_s: seconds from the start of the run.
    num_prompt_tokens: length of the prompt, at least 1.
    max_output_tokens: generation stops after this many, at least 1.
    block_keys: keys of the prompt's complete blocks, first block first.
    prompt: int32 [num_prompt_tokens]; None in a simulation from lengths.
    sampling: how tokens are drawn.
    stop_token_ids: any of these ends the output (and is its last token).
      Empty for a trace, whose output length is given.
    tenant: whose request this is.
    priority: 0 unless it says; lower ones leave room for higher ones where
      admission is 'slo_predictive'.
    identity: what `block_keys` were made with, see `blocks.keys.prefix_keys`;
      their salt is the tenant.
    output_block_keys: keys of all blocks that the longest output completes,
      where no tokens will tell them; () if nobody knows.
    reuse_known: whether equal keys are all that could be reused. A trace
      without hashes has keys that nothing shares, and no hit rate.
  """

  request_id: str
  arrival_s: float
  num_prompt_tokens: int
  max_output_tokens: int
  block_keys: tuple[BlockKey, ...] = ()
  prompt: np.ndarray | None = None
  sampling: Sampling = Sampling()
  stop_token_ids: tuple[int, ...] = ()
  tenant: str = ''
  priority: int = 0
  identity: str = '0'
  output_block_keys: tuple[BlockKey, ...] = ()
  reuse_known: bool = True

  def __post_init__(self):
    name = f'request {self.request_id!r}'
    if self.num_prompt_tokens < 1:
      raise ValueError(
        f'{name}: num_prompt_tokens={self.num_prompt_tokens}, '
        'the prompt is empty'
      )
    if self.max_output_tokens < 1:
      raise ValueError(
        f'{name}: max_output_tokens={self.max_output_tokens} must be >= 1'
      )
    if self.arrival_s < 0:
      raise ValueError(f'{name}: arrival_s={self.arrival_s} must be >= 0')
    if self.prompt is not None and len(self.prompt) != self.num_prompt_tokens:
      raise ValueError(
        f'{name}: num_prompt_tokens={self.num_prompt_tokens} '
        f'but the prompt has {len(self.prompt)}'
      )


@dataclass(frozen=True)
class Placement:
  """Where a request goes and what the Conductor expects of it.

  The prefix is a plan made on a view that may be stale: what is gone when the
  request starts is recomputed. Its blocks [0, local_blocks) lie in the prefill
  instance's own segment, [local_blocks, local_blocks + fetch_blocks) are first
  copied there from `fetch_from`'s segment.

  Attributes:
    attempt: counts the tries of one request, from 0.
    local_blocks, fetch_blocks: in blocks.
    fetch_from: name of an instance, or None where fetch_blocks is 0.
    ssd_blocks, device_blocks: of the local ones, those on its SSD, and those
      that need not be moved; the others lie in host memory.
    store_blocks: expected to be read after those from the remote store.
    queue_s, transfer_s, prefill_s: the three predicted terms of TTFT;
      transfer_s is what neither queue nor compute hides.
    fetch_s: predicted seconds until the reused prefix is on the device.
    tbt_s: predicted step time of the decode instance with this request in it.
  """

  request_id: str
  attempt: int
  prefill: str
  decode: str
  local_blocks: int = 0
  fetch_blocks: int = 0
  fetch_from: str | None = None
  queue_s: float = 0.0
  transfer_s: float = 0.0
  prefill_s: float = 0.0
  tbt_s: float = 0.0
  fetch_s: float = 0.0
  store_blocks: int = 0
  ssd_blocks: int = 0
  device_blocks: int = 0

  @property
  def host_blocks(self) -> int:
    """Of the local ones, those in host memory."""
    return self.local_blocks - self.ssd_blocks - self.device_blocks

  @property
  def reused_blocks(self) -> int:
    return self.local_blocks + self.fetch_blocks + self.store_blocks

  @property
  def ttft_s(self) -> float:
    return self.queue_s + self.transfer_s + self.prefill_s


@dataclass(frozen=True)
class Rejection:
  """An early 'no' (HTTP 429), with what was predicted.

  Attributes:
    reason: which SLO it would miss: 'ttft' or 'tbt'; 'no_instance' where no
      instance can take it.
    ttft_s, tbt_s: the predictions that led to it.
    retry_after_s: when asking again may help; None if it never does, or who
      knows: where no instance is, one may join.
  """

  request_id: str
  reason: str
  ttft_s: float
  tbt_s: float
  retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenSegment:
  """Tokens emitted one after another, each gap by as much longer.

  Token i comes at first_s + i * interval_s + growth_s * i * (i - 1) / 2: the
  gap behind it is interval_s + i * growth_s, as contexts grow by a token a row
  and step. A device emits segments of one token; the simulator, long ones.
  """

  first_s: float
  interval_s: float
  count: int
  growth_s: float = 0.0

  def token_s(self, i: int) -> float:
    """When token i came; the count-th is the one that would come next."""
    growth_s = self.growth_s * (i * (i - 1) / 2)
    return self.first_s + i * self.interval_s + growth_s

  @property
  def last_s(self) -> float:
    return self.token_s(self.count - 1)

  @property
  def mean_interval_s(self) -> float:
    """Of the gaps between its tokens; 0 of one token."""
    if self.count < 2:
      return 0.0
    return self.interval_s + self.growth_s * (self.count - 2) / 2

  def without(self, num_tokens: int) -> 'TokenSegment':
    """The rest behind its first tokens."""
    return TokenSegment(
      self.token_s(num_tokens),
      self.interval_s + num_tokens * self.growth_s,
      self.count - num_tokens,
      self.growth_s,
    )

  def until(self, time_s: float) -> 'TokenSegment':
    """Its tokens up to the first that comes at or after `time_s`."""
    late_s, half_s = time_s - self.first_s, self.growth_s / 2
    if late_s <= 0 or not self.interval_s:
      return TokenSegment(self.first_s, self.interval_s, 1, self.growth_s)
    # The root of late_s = i * interval_s + i * (i - 1) * half_s.
    slope_s = self.interval_s - half_s
    root = math.sqrt(max(slope_s**2 + 4 * half_s * late_s, 0.0))
    steps = 2 * late_s / (slope_s + root)
    # The small slack keeps a token hit exactly from rounding up.
    count = min(1 + math.ceil(steps - 1e-9), self.count)
    return TokenSegment(self.first_s, self.interval_s, count, self.growth_s)


class RowTokens(NamedTuple):
  """What one try emitted; see `Emitted`."""

  request_id: str
  attempt: int
  segment: TokenSegment
  tokens: tuple[int, ...]
  logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Emitted:
  """Tokens that some tries emitted at the same times, as many each.

  One value a decode step, or many steps of a simulation, and not one a row:
  the thread that dispatches makes it.

  Attributes:
    tries: whose they are.
    segment: when they came, of each try.
    tokens: one a try, as devices tell each step; empty where nothing is
      computed. Nothing follows a stop token.
    logprobs: one a try, None where its sampling does not ask for them; empty
      where nobody's does.
  """

  tries: tuple[TryKey, ...]
  segment: TokenSegment
  tokens: tuple[int, ...] = ()
  logprobs: tuple[TokenLogprobs | None, ...] = ()

  @property
  def rows(self) -> Iterator[RowTokens]:
    """The same, try by try."""
    for i, (request_id, attempt) in enumerate(self.tries):
      likely = self.logprobs[i] if self.logprobs else None
      yield RowTokens(
        request_id,
        attempt,
        self.segment,
        self.tokens[i : i + 1],
        () if likely is None else (likely,),
      )

  def of(self, places: list[int]) -> 'Emitted':
    """What the tries at these places in `tries` emitted."""
    return Emitted(
      tuple([self.tries[i] for i in places]),
      self.segment,
      tuple([self.tokens[i] for i in places]) if self.tokens else (),
      tuple([self.logprobs[i] for i in places]) if self.logprobs else (),
    )


Outcome = Literal[
  'completed', 'rejected', 'rejected_late', 'failed', 'cancelled', 'running'
]


@dataclass
class RequestRecord:
  """What became of a request; its time stamps stand in life order.

  Attributes:
    attempt: the last try, from 0.
    outcome: 'rejected' before any work, 'rejected_late' after prefill.
    reason: why it was rejected, failed or cancelled; '' if completed.
    prompt_tokens: length of the prompt.
    reused_tokens: prompt tokens not computed by any try, by their tier
      ('local_device', 'local_host', 'local_ssd',
      'remote_host': another instance's, on whatever medium;
      'remote_store': a Mooncake Store's).
    reuse_known: whether the workload says what could be reused.
    prefill_s: seconds its chunks ran that ended, those of all tries.
    preemptions: how often it lost its decode pages and resumed.
    preempted_s: seconds from there until its KVCache was back, or it ended.
    recomputed_tokens: prompt and output tokens that were computed again, for
      that or by another try.
    output_tokens: token ids in order (empty in a simulation from lengths).
    segments: when each output token came.
    predicted_ttft_s, predicted_tbt_s: the Conductor's at placement.
    predicted_queue_s, predicted_transfer_s, predicted_prefill_s: the terms of
      that TTFT; None of a rejected request.
  """

  request_id: str
  prompt_tokens: int
  arrival_s: float
  attempt: int = 0
  prefill: str | None = None
  decode: str | None = None
  outcome: Outcome = 'running'
  reason: str = ''
  reused_tokens: dict[str, int] = field(default_factory=dict)
  reuse_known: bool = True
  predicted_ttft_s: float | None = None
  predicted_tbt_s: float | None = None
  predicted_queue_s: float | None = None
  predicted_transfer_s: float | None = None
  predicted_prefill_s: float | None = None
  placed_s: float | None = None
  fetch_start_s: float | None = None
  prefill_start_s: float | None = None
  prefill_done_s: float | None = None
  prefill_s: float = 0.0
  preemptions: int = 0
  preempted_s: float = 0.0
  recomputed_tokens: int = 0
  kv_arrived_s: float | None = None
  first_token_s: float | None = None
  finished_s: float | None = None
  segments: list[TokenSegment] = field(default_factory=list)
  output_tokens: list[int] = field(default_factory=list)

  @property
  def num_output_tokens(self) -> int:
    return sum(segment.count for segment in self.segments)

  @property
  def ttft_s(self) -> float | None:
    if self.first_token_s is None:
      return None
    return self.first_token_s - self.arrival_s
