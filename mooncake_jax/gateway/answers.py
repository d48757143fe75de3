# SPDX-License-Identifier: Apache-2.0
"""What is answered, as pydantic models, whole and in chunks."""

from typing import Annotated
from typing import Literal

from pydantic import BaseModel
from pydantic import Field

FinishReason = Literal['stop', 'length']


class PromptDetails(BaseModel):
  # Prompt tokens whose KVCache was not computed.
  cached_tokens: int = 0


class Usage(BaseModel):
  prompt_tokens: int
  completion_tokens: int
  total_tokens: int
  prompt_tokens_details: PromptDetails = PromptDetails()


class TextLogprobs(BaseModel):
  """Of /v1/completions: one entry a token."""

  tokens: list[str]
  token_logprobs: list[float | None]
  top_logprobs: list[dict[str, float] | None]
  text_offset: list[int]


class LikelyToken(BaseModel):
  token: str
  logprob: float
  bytes: list[int] | None


class TokenLogprob(LikelyToken):
  top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
  """Of /v1/chat/completions."""

  content: list[TokenLogprob]
  refusal: None = None


class TextChoice(BaseModel):
  index: int
  text: str
  logprobs: TextLogprobs | None = None
  finish_reason: FinishReason | None = None


class AnswerMessage(BaseModel):
  role: Literal['assistant'] = 'assistant'
  content: str
  refusal: None = None


class ChatChoice(BaseModel):
  index: int
  message: AnswerMessage
  logprobs: ChatLogprobs | None = None
  finish_reason: FinishReason | None = None


class Delta(BaseModel):
  role: Literal['assistant'] | None = None
  content: str | None = None


class DeltaChoice(BaseModel):
  index: int
  delta: Delta
  logprobs: ChatLogprobs | None = None
  finish_reason: FinishReason | None = None


class Answer(BaseModel):
  """Head of all answers."""

  id: str
  created: int
  model: str


class Completion(Answer):
  """A whole answer, or a chunk of one."""

  object: Literal['text_completion'] = 'text_completion'
  choices: list[TextChoice]
  usage: Usage | None = None


class ChatCompletion(Answer):
  object: Literal['chat.completion'] = 'chat.completion'
  choices: list[ChatChoice]
  usage: Usage | None = None


class ChatChunk(Answer):
  object: Literal['chat.completion.chunk'] = 'chat.completion.chunk'
  choices: list[DeltaChoice]
  usage: Usage | None = None


class ModelCard(BaseModel):
  id: str
  object: Literal['model'] = 'model'
  created: int
  owned_by: str = 'mooncake_jax'
  max_model_len: Annotated[int, Field(ge=1)]


class ModelList(BaseModel):
  object: Literal['list'] = 'list'
  data: list[ModelCard]


class Health(BaseModel):
  status: Literal['ok', 'draining', 'failed']
