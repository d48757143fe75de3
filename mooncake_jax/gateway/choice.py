# SPDX-License-Identifier: Apache-2.0
"""One answer under way: what the loop tells of it, and what a client gets.

Whatever a client does not take stays as tokens, at most the request's
`max_output_tokens`; so a slow reader costs a few bytes a token and nobody's
time, and gets in one chunk what came meanwhile.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

from mooncake_jax.events import PrefixFetched
from mooncake_jax.gateway.answers import FinishReason
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.errors import rejected
from mooncake_jax.gateway.errors import too_many
from mooncake_jax.gateway.text_stream import TextStream
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import RowTokens
from mooncake_jax.request import TokenLogprobs
from mooncake_jax.serve import Decision

# What the loop tells of a request.
Told = Decision | RowTokens | PrefixFetched | RequestRecord


class Piece(NamedTuple):
  """What a client has not got yet of an answer.

  Attributes:
    tokens: shown or held back with this piece; end tokens are left out.
    logprobs: as many as tokens, or none.
    finish_reason: of an answer's last piece.
  """

  text: str
  tokens: list[int]
  logprobs: list[TokenLogprobs]
  finish_reason: FinishReason | None


class Choice:
  """An engine's request as an answer.

  Attributes:
    index: among the answers of the client's request.
    owner: name of the tenant whose it is.
    num_tokens: that came so far, an end token included.
    cached_tokens: of the prompt, not computed.
    failure: why there is no answer, or no more of it.
    is_ended: the loop has told its end.
    finish_reason: once the last piece was taken.
  """

  def __init__(
    self,
    index: int,
    request: Request,
    text: TextStream,
    ends: frozenset[int],
    min_tokens: int = 0,
    placeholders: Sequence[int] = (0,),
  ):
    """`ends` are tokens that end it, from the `min_tokens`-th on;
    `placeholders` stand in for what a simulation does not compute.
    """
    self.index = index
    self.owner = ''
    self.request = request
    self.num_tokens = 0
    self.cached_tokens = 0
    self.failure: ApiError | None = None
    self.is_ended = False
    self.finish_reason: FinishReason | None = None
    self.on_change: Callable[[], object] = lambda: None
    self._text = text
    self._ends = ends
    self._min_tokens = min_tokens
    self._placeholders = placeholders
    self._tokens: list[int] = []
    self._logprobs: list[TokenLogprobs] = []
    self._num_taken = 0
    # The try that emits, and how far it is.
    self._attempt = 0
    self._num_emitted = 0
    self._rejection: Rejection | None = None

  @property
  def is_over(self) -> bool:
    """Whether there is nothing more to take."""
    return self.finish_reason is not None or self.failure is not None

  @property
  def was_refused(self) -> bool:
    """Whether the Conductor said no before anything was computed."""
    return self._rejection is not None and not self.has_begun

  @property
  def has_begun(self) -> bool:
    return self.num_tokens > 0

  def hear(self, told: Told) -> None:
    """Takes in what the loop told."""
    if isinstance(told, RowTokens):
      self._emitted(told)
    elif isinstance(told, PrefixFetched):
      self.cached_tokens = (
        told.device_tokens
        + told.local_tokens
        + told.ssd_tokens
        + told.remote_tokens
        + told.store_tokens
      )
    elif isinstance(told, Decision):
      if isinstance(told.decision, Rejection):
        self._rejection = told.decision
    else:
      self._ended(told)
    self.on_change()

  def fail(self, failure: ApiError) -> None:
    """There will be no more of it."""
    if not self.is_over:
      self.failure = failure
    self.is_ended = True
    self.on_change()

  def take(self) -> Piece | None:
    """What is new, if anything."""
    if self.is_over or not (self._tokens or self.is_ended):
      return None
    tokens, self._tokens = self._tokens, []
    logprobs, self._logprobs = self._logprobs, []
    reason = self._cut(tokens)
    del logprobs[len(tokens) :]
    text = self._text.push(tokens) if tokens else ''
    if self._text.stopped is not None:
      reason = 'stop'
    elif reason is None and self.is_ended:
      reason = 'length'
    if reason is not None:
      text += self._text.end()
      self.finish_reason = reason
    if not text and not logprobs and reason is None:
      return None
    return Piece(text, tokens, logprobs, reason)

  def _cut(self, tokens: list[int]) -> FinishReason | None:
    """Drops an end token and what follows."""
    first = max(self._min_tokens - self._num_taken, 0)
    self._num_taken += len(tokens)
    for i in range(first, len(tokens)):
      if tokens[i] in self._ends:
        self.num_tokens -= len(tokens) - i - 1
        del tokens[i:]
        return 'stop'
    return None

  def _emitted(self, row: RowTokens) -> None:
    """Keeps new tokens, less those that an earlier try had emitted."""
    if self.is_over:
      return  # the engine has yet to hear of its end
    if row.attempt != self._attempt:
      self._attempt, self._num_emitted = row.attempt, 0
    count = row.segment.count
    skip = min(self.num_tokens - self._num_emitted, count)
    self._num_emitted += count
    words = self._placeholders
    self._tokens += row.tokens[skip:] or [
      words[i % len(words)]
      for i in range(self.num_tokens, self.num_tokens + count - skip)
    ]
    self._logprobs += row.logprobs[skip:]
    self.num_tokens += count - skip

  def _ended(self, record: RequestRecord) -> None:
    self.is_ended = True
    if record.outcome != 'completed' and not self.is_over:
      self.failure = self._why(record)

  def _why(self, record: RequestRecord) -> ApiError:
    """What to tell a client: the reason is of its own request."""
    if self._rejection is not None and record.outcome == 'rejected':
      return rejected(self._rejection)
    if record.outcome == 'rejected_late':
      return too_many(
        'The cluster is overloaded: decoding would be too slow.',
        f'overloaded_late_{record.reason}',
        1.0,
        {'predicted_ttft_s': record.predicted_ttft_s or 0.0},
      )
    if record.placed_s is None:
      return ApiError(400, record.reason, 'context_length_exceeded')
    if record.reason.startswith('deadline'):
      return ApiError(504, 'The request took too long.', 'deadline')
    if record.outcome == 'cancelled':
      return ApiError(503, 'The server cancelled the request.', 'cancelled')
    return ApiError(503, 'The request failed; try again.', 'failed')
