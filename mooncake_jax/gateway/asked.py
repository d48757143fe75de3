# SPDX-License-Identifier: Apache-2.0
"""From a client's request to the engine's: tokens, keys, sampling, limits."""

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import secrets

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.codec import Codec
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.limits import GatewaySpec
from mooncake_jax.gateway.schema import ChatRequest
from mooncake_jax.gateway.schema import CompletionRequest
from mooncake_jax.gateway.text_stream import TextStream
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request
from mooncake_jax.request import Sampling

# OpenAI's, of /v1/completions.
DEFAULT_MAX_TOKENS = 16
Body = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class Served:
  """The model that is served, as far as requests depend on it.

  Attributes:
    name: what clients call it.
    max_tokens: of prompt and output together.
    identity: seed of block keys, see `blocks.keys.prefix_keys`.
    stop_token_ids: what ends an answer.
    placeholders: a simulation answers with these tokens; () on devices.
    created: seconds since 1970.
  """

  name: str
  codec: Codec
  vocab_size: int
  max_tokens: int
  block_size_tokens: int
  identity: str
  stop_token_ids: tuple[int, ...]
  placeholders: tuple[int, ...]
  created: int

  @property
  def is_simulated(self) -> bool:
    return bool(self.placeholders)


def salted(tenant_salt: str, cache_salt: str | None) -> str:
  """Whose KVCache a request may share; '' is everybody's without a salt.

  A hash, so that no salt of one tenant can spell another tenant's.
  """
  if not tenant_salt and not cache_salt:
    return ''
  parts = (tenant_salt, cache_salt or '')
  text = ''.join(f'{len(part)}:{part}' for part in parts)
  return hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]


def no_such_model(asked: str, served: Served) -> ApiError:
  """The 404, with the name that there is."""
  message = f'model: {asked[:64]!r} is not served, {served.name!r} is'
  return ApiError(404, message, 'model_not_found', 'model')


def prepare(
  body: Body, call_id: str, served: Served, spec: GatewaySpec, tenant_salt: str
) -> list[Choice]:
  """The answers that a request asks for, prompt by prompt.

  Raises:
    ApiError: 400 for what can't be served, 404 for another model.
  """
  if body.model != served.name:
    raise no_such_model(body.model, served)
  if served.is_simulated and body.top_logprobs_asked is not None:
    raise ApiError(
      400, 'logprobs: a simulation has none', 'unsupported', 'logprobs'
    )
  # Counted before any becomes tokens: a body may have a million of them.
  num_prompts = len(_listed(body)) if isinstance(body, CompletionRequest) else 1
  if num_prompts * body.num_answers > spec.max_choices:
    raise ApiError(
      400, f'n: more than {spec.max_choices} answers', 'too_many_choices', 'n'
    )
  salt = salted(tenant_salt, body.cache_salt)
  choices: list[Choice] = []
  for prompt in _prompts(body, served):
    choices += _choices(body, prompt, call_id, len(choices), served, spec, salt)
  return choices


def prompt_texts(body: Body, served: Served) -> list[str]:
  """Prompts as text, to be echoed; tokens are decoded."""
  assert isinstance(body, CompletionRequest)
  return [
    prompt if isinstance(prompt, str) else served.codec.decode(prompt)
    for prompt in _listed(body)
  ]


def _listed(body: CompletionRequest) -> list[str] | list[list[int]]:
  prompt = body.prompt
  if isinstance(prompt, str):
    return [prompt]
  if isinstance(prompt[0], int):
    return [prompt]  # pyright: ignore[reportReturnType]
  return prompt  # pyright: ignore[reportReturnType]


def _prompts(body: Body, served: Served) -> Iterator[Sequence[int]]:
  codec = served.codec
  if isinstance(body, ChatRequest):
    try:
      yield codec.encode_chat([m.plain() for m in body.messages])
    except ValueError as error:
      message = str(error).split('chat_template: ')[-1]
      raise ApiError(400, message, 'invalid_value', 'messages') from None
    return
  for prompt in _listed(body):
    yield codec.encode(prompt) if isinstance(prompt, str) else prompt


def _choices(
  body: Body,
  prompt: Sequence[int],
  call_id: str,
  first: int,
  served: Served,
  spec: GatewaySpec,
  salt: str,
) -> Iterator[Choice]:
  """All answers to one prompt."""
  where = 'messages' if isinstance(body, ChatRequest) else 'prompt'
  tokens, max_output = _checked(body, prompt, where, served, spec)
  keys = prefix_keys(
    tokens, served.block_size_tokens, served.identity, salt=salt or None
  )
  output_keys = _output_keys(tokens, max_output, keys, served, salt)
  ends = frozenset(
    () if body.ignore_eos else served.stop_token_ids
  ) | frozenset(body.stop_token_ids or ())
  seed = secrets.randbits(32) if body.seed is None else body.seed
  for i in range(first, first + body.num_answers):
    request = Request(
      f'{call_id}-{i}',
      0.0,
      len(tokens),
      max_output,
      keys,
      None if served.is_simulated else tokens,
      _sampling(body, seed + i - first),
      # The engine knows no least length: ends are then looked for here.
      () if body.min_tokens else tuple(sorted(ends)),
      salt,
      body.priority or 0,
      served.identity,
      output_keys,
    )
    yield Choice(
      i,
      request,
      TextStream(served.codec.decode, body.stops),
      ends,
      body.min_tokens or 0,
      served.placeholders or (0,),
    )


def _checked(
  body: Body,
  prompt: Sequence[int],
  where: str,
  served: Served,
  spec: GatewaySpec,
) -> tuple[np.ndarray, int]:
  """The prompt's tokens and the longest output; raises `ApiError`."""
  if not len(prompt):
    raise ApiError(400, f'{where}: is empty', 'invalid_value', where)
  tokens = np.asarray(prompt, np.int32)
  if tokens.max() >= served.vocab_size:
    raise ApiError(
      400,
      f'{where}: token ids must be below {served.vocab_size}',
      'invalid_value',
      where,
    )
  room = served.max_tokens - len(tokens)
  most = body.output_limit
  if most is None:
    most = room if isinstance(body, ChatRequest) else DEFAULT_MAX_TOKENS
    most = min(most, spec.max_output_tokens or most, max(room, 1))
  if spec.max_output_tokens is not None and most > spec.max_output_tokens:
    raise ApiError(
      400,
      f'max_tokens: at most {spec.max_output_tokens} here',
      'invalid_value',
      'max_tokens',
    )
  if most > room:
    raise ApiError(
      400,
      f'This model has room for {served.max_tokens} tokens; the prompt has '
      f'{len(tokens)} and max_tokens is {most}.',
      'context_length_exceeded',
      where,
    )
  return tokens, most


def _sampling(body: Body, seed: int) -> Sampling:
  """OpenAI's defaults: what is not said is drawn at temperature 1."""
  temperature = 1.0 if body.temperature is None else body.temperature
  return Sampling(
    temperature,
    max(body.top_k or 0, 0),
    1.0 if body.top_p is None else body.top_p,
    body.min_p or 0.0,
    seed % 2**32,
    body.top_logprobs_asked,
  )


def _output_keys(
  tokens: np.ndarray,
  max_output: int,
  keys: tuple[BlockKey, ...],
  served: Served,
  salt: str,
) -> tuple[BlockKey, ...]:
  """Keys of the blocks that placeholders will complete, for the next turn."""
  if not served.is_simulated:
    return ()
  words = np.resize(np.array(served.placeholders, np.int32), max_output)
  whole = prefix_keys(
    np.concatenate([tokens, words]),
    served.block_size_tokens,
    served.identity,
    salt=salt or None,
    known=keys,
  )
  return whole[len(keys) :]
