# SPDX-License-Identifier: Apache-2.0
"""What may be asked, as pydantic models: OpenAI's fields and a few of vLLM's.

A field that is not here is refused, so that nobody believes in a setting that
does nothing. Fields that change the answer and that the engine lacks may be
given at the value at which they change nothing.
"""

from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from pydantic import model_validator

from mooncake_jax.request import MAX_LOGPROBS

MAX_STOPS = 16
INT64 = 2**63
# As pydantic's errors and OpenAPI's documents have them.
Text = Annotated[str, Field(max_length=8 << 20)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]


class Strict(BaseModel):
  """No unknown field, no number in quotes, no NaN."""

  model_config = ConfigDict(
    extra='forbid', strict=True, allow_inf_nan=False, frozen=True
  )


class StreamOptions(Strict):
  include_usage: bool | None = None
  # Usage so far with every chunk, as vLLM has it.
  continuous_usage_stats: bool | None = None


class Sampled(Strict):
  """What both endpoints have in common."""

  model: Annotated[str, Field(max_length=256)]
  n: Annotated[int, Field(ge=1, le=128)] | None = None
  max_tokens: Count | None = None
  temperature: Annotated[float, Field(ge=0, le=2)] | None = None
  top_p: Annotated[float, Field(gt=0, le=1)] | None = None
  seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
  stop: (
    Stop
    | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
    | None
  ) = None
  stream: bool | None = None
  stream_options: StreamOptions | None = None
  # Of vLLM: top_k of 0 or -1 draws from all tokens.
  top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
  min_p: Annotated[float, Field(ge=0, le=1)] | None = None
  ignore_eos: bool | None = None
  min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
  stop_token_ids: (
    Annotated[list[Token], Field(max_length=64, fail_fast=True)] | None
  ) = None
  # Higher ones go before lower ones where admission is 'slo_predictive'.
  priority: Annotated[int, Field(ge=-100, le=100)] | None = None
  # Requests with different salts never share KVCache.
  cache_salt: Annotated[str, Field(max_length=256)] | None = None
  # Taken, and not looked at.
  user: Annotated[str, Field(max_length=256)] | None = None
  # Only at the values at which they change nothing.
  presence_penalty: Zero | None = None
  frequency_penalty: Zero | None = None
  repetition_penalty: One | None = None
  logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

  @model_validator(mode='after')
  def _consistent(self):
    if self.stream_options is not None and not self.stream:
      raise ValueError('stream_options needs stream=true')
    most = self.output_limit
    if most is not None and (self.min_tokens or 0) > most:
      raise ValueError('min_tokens must not exceed max_tokens')
    return self

  @property
  def output_limit(self) -> int | None:
    """Most tokens of an answer; None where the request does not say."""
    return self.max_tokens

  @property
  def num_answers(self) -> int:
    return self.n or 1

  @property
  def stops(self) -> list[str]:
    if isinstance(self.stop, str):
      return [self.stop]
    return self.stop or []

  @property
  def top_logprobs_asked(self) -> int | None:
    """How many likeliest tokens to tell; None tells no log probabilities."""
    raise NotImplementedError

  @property
  def wants_usage(self) -> bool:
    options = self.stream_options
    return bool(options and options.include_usage)


class CompletionRequest(Sampled):
  """POST /v1/completions."""

  prompt: (
    Text
    | Tokens
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
  )
  echo: bool | None = None
  logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
  best_of: Annotated[int, Field(ge=1, le=128)] | None = None
  suffix: None = None

  @model_validator(mode='after')
  def _supported(self):
    if self.best_of is not None and self.best_of != self.num_answers:
      raise ValueError('best_of must be n, no answers are thrown away')
    if self.echo and self.logprobs is not None:
      raise ValueError('echo with logprobs: a prompt has no log probabilities')
    return self

  @property
  def top_logprobs_asked(self) -> int | None:
    return self.logprobs


class TextPart(Strict):
  type: Literal['text']
  text: Text


class ChatMessage(Strict):
  role: Literal['system', 'developer', 'user', 'assistant']
  content: Text | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
  name: Annotated[str, Field(max_length=256)] | None = None

  def plain(self) -> dict[str, Any]:
    """As chat templates read it."""
    parts = self.content
    text = parts if isinstance(parts, str) else ''.join(p.text for p in parts)
    role = 'system' if self.role == 'developer' else self.role
    return {'role': role, 'content': text}


class PlainText(Strict):
  type: Literal['text']


class ChatRequest(Sampled):
  """POST /v1/chat/completions."""

  messages: Annotated[
    list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)
  ]
  max_completion_tokens: Count | None = None
  logprobs: bool | None = None
  top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
  response_format: PlainText | None = None

  @model_validator(mode='after')
  def _supported(self):
    if self.top_logprobs is not None and not self.logprobs:
      raise ValueError('top_logprobs needs logprobs=true')
    both = {self.max_tokens, self.max_completion_tokens} - {None}
    if len(both) > 1:
      raise ValueError('max_tokens and max_completion_tokens differ')
    return self

  @property
  def output_limit(self) -> int | None:
    return self.max_completion_tokens or self.max_tokens

  @property
  def top_logprobs_asked(self) -> int | None:
    return (self.top_logprobs or 0) if self.logprobs else None
