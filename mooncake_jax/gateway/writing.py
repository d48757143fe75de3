# SPDX-License-Identifier: Apache-2.0
"""Answers as bodies and as server-sent events.

Text without log probabilities, which is most of what is ever written, goes
into a chunk made once an answer: `head + json text + tail`.
"""

from codecs import getincrementaldecoder
from codecs import IncrementalDecoder
from collections.abc import Iterable
from collections.abc import Sequence
import json

from pydantic import BaseModel

from mooncake_jax.gateway.answers import Answer
from mooncake_jax.gateway.answers import AnswerMessage
from mooncake_jax.gateway.answers import ChatChoice
from mooncake_jax.gateway.answers import ChatChunk
from mooncake_jax.gateway.answers import ChatCompletion
from mooncake_jax.gateway.answers import ChatLogprobs
from mooncake_jax.gateway.answers import Completion
from mooncake_jax.gateway.answers import Delta
from mooncake_jax.gateway.answers import DeltaChoice
from mooncake_jax.gateway.answers import LikelyToken
from mooncake_jax.gateway.answers import PromptDetails
from mooncake_jax.gateway.answers import TextChoice
from mooncake_jax.gateway.answers import TextLogprobs
from mooncake_jax.gateway.answers import TokenLogprob
from mooncake_jax.gateway.answers import Usage
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.choice import Piece
from mooncake_jax.gateway.codec import Codec
from mooncake_jax.gateway.errors import ApiError
from mooncake_jax.gateway.schema import Sampled
from mooncake_jax.request import TokenLogprobs

DONE = b'data: [DONE]\n\n'
# Stands where a chunk's text goes until its template is cut there.
_MARK = '\N{NULL}'
_MARK_JSON = json.dumps(_MARK)


def event(value: BaseModel) -> bytes:
  """One server-sent event."""
  return b'data: ' + value.model_dump_json().encode() + b'\n\n'


def failure(error: ApiError) -> bytes:
  """Ends a stream that had begun."""
  return b'data: ' + error.body + b'\n\n' + DONE


def usage(choices: Iterable[Choice], num_prompts: int) -> Usage:
  """Of all answers; each prompt counts once, as OpenAI counts."""
  choices = [*choices]
  firsts = choices[:: max(len(choices) // num_prompts, 1)]
  prompt = sum(choice.request.num_prompt_tokens for choice in firsts)
  output = sum(choice.num_tokens for choice in choices)
  cached = sum(choice.cached_tokens for choice in firsts)
  return Usage(
    prompt_tokens=prompt,
    completion_tokens=output,
    total_tokens=prompt + output,
    prompt_tokens_details=PromptDetails(cached_tokens=cached),
  )


class Writer:
  """Words the answers to one request; see `TextWriter`, `ChatWriter`."""

  def __init__(self, body: Sampled, codec: Codec, head: Answer):
    """`head` has what all chunks share."""
    self._head = head.model_dump()
    self._codec = codec
    self._asks_logprobs = body.top_logprobs_asked is not None
    self._templates: dict[int, tuple[bytes, bytes]] = {}

  def chunk(self, choice: Choice, piece: Piece, so_far: Usage | None) -> bytes:
    """The events of one piece."""
    if piece.finish_reason or self._asks_logprobs or so_far or not piece.text:
      return event(self._chunk(choice, piece, so_far))
    template = self._templates.get(choice.index)
    if template is None:
      marked = event(self._chunk(choice, Piece(_MARK, [], [], None), None))
      head, _, tail = marked.partition(_MARK_JSON.encode())
      template = self._templates[choice.index] = (head, tail)
    return template[0] + json.dumps(piece.text).encode() + template[1]

  def first(self, choice: Choice) -> bytes:
    """What comes before an answer's first piece."""
    raise NotImplementedError

  def last(self, total: Usage) -> bytes:
    """The chunk that has the usage, and no choice."""
    raise NotImplementedError

  def whole(
    self, choices: Sequence[Choice], pieces: Sequence[list[Piece]], total: Usage
  ) -> Answer:
    """All at once."""
    raise NotImplementedError

  def _chunk(
    self, choice: Choice, piece: Piece, so_far: Usage | None
  ) -> Answer:
    raise NotImplementedError

  def _word(self, token: int) -> str:
    """Its text, or what it is of a character: 'bytes:\\xe6\\x97'."""
    raw = self._codec.token_bytes(token)
    try:
      return raw.decode()
    except UnicodeDecodeError:
      return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in raw)


class TextWriter(Writer):
  """/v1/completions."""

  def __init__(
    self, body: Sampled, codec: Codec, head: Answer, echoes: Sequence[str] = ()
  ):
    """`echoes` are the prompts, where they come back before the answers."""
    super().__init__(body, codec, head)
    self._echoes = echoes
    self._num_answers = body.num_answers
    # By answer: how long its text is, and what awaits the rest of a character.
    self._offsets: dict[int, tuple[int, IncrementalDecoder]] = {}

  def first(self, choice: Choice) -> bytes:
    if not self._echoes:
      return b''
    piece = Piece(self._echo(choice), [], [], None)
    return event(self._chunk(choice, piece, None))

  def last(self, total: Usage) -> bytes:
    return event(Completion(**self._head, choices=[], usage=total))

  def whole(
    self, choices: Sequence[Choice], pieces: Sequence[list[Piece]], total: Usage
  ) -> Completion:
    made = [
      self._choice(choice, merged(found, self._echo(choice)))
      for choice, found in zip(choices, pieces, strict=True)
    ]
    return Completion(**self._head, choices=made, usage=total)

  def _echo(self, choice: Choice) -> str:
    if not self._echoes:
      return ''
    return self._echoes[choice.index // self._num_answers]

  def _chunk(
    self, choice: Choice, piece: Piece, so_far: Usage | None
  ) -> Completion:
    made = self._choice(choice, piece)
    return Completion(**self._head, choices=[made], usage=so_far)

  def _choice(self, choice: Choice, piece: Piece) -> TextChoice:
    return TextChoice(
      index=choice.index,
      text=piece.text,
      logprobs=self._logprobs(choice, piece),
      finish_reason=piece.finish_reason,
    )

  def _logprobs(self, choice: Choice, piece: Piece) -> TextLogprobs | None:
    if not self._asks_logprobs:
      return None
    words, offsets = [self._word(token) for token in piece.tokens], []
    fresh = 0, getincrementaldecoder('utf-8')('replace')
    at, decoder = self._offsets.get(choice.index, fresh)
    for token in piece.tokens:
      offsets.append(at)
      at += len(decoder.decode(self._codec.token_bytes(token)))
    self._offsets[choice.index] = at, decoder
    return TextLogprobs(
      tokens=words,
      token_logprobs=[likely.logprob for likely in piece.logprobs],
      top_logprobs=[
        {self._word(token): logprob for token, logprob in likely.top}
        for likely in piece.logprobs
      ],
      text_offset=offsets,
    )


class ChatWriter(Writer):
  """/v1/chat/completions."""

  def first(self, choice: Choice) -> bytes:
    delta = Delta(role='assistant', content='')
    made = DeltaChoice(index=choice.index, delta=delta)
    return event(ChatChunk(**self._head, choices=[made]))

  def last(self, total: Usage) -> bytes:
    return event(ChatChunk(**self._head, choices=[], usage=total))

  def whole(
    self, choices: Sequence[Choice], pieces: Sequence[list[Piece]], total: Usage
  ) -> ChatCompletion:
    made = []
    for choice, found in zip(choices, pieces, strict=True):
      piece = merged(found)
      made.append(
        ChatChoice(
          index=choice.index,
          message=AnswerMessage(content=piece.text),
          logprobs=self._logprobs(piece),
          finish_reason=piece.finish_reason,
        )
      )
    return ChatCompletion(**self._head, choices=made, usage=total)

  def _chunk(
    self, choice: Choice, piece: Piece, so_far: Usage | None
  ) -> ChatChunk:
    made = DeltaChoice(
      index=choice.index,
      delta=Delta(content=piece.text) if piece.text else Delta(),
      logprobs=self._logprobs(piece),
      finish_reason=piece.finish_reason,
    )
    return ChatChunk(**self._head, choices=[made], usage=so_far)

  def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
    if not self._asks_logprobs:
      return None
    pairs = zip(piece.tokens, piece.logprobs, strict=True)
    return ChatLogprobs(content=[self._token(t, found) for t, found in pairs])

  def _token(self, token: int, found: TokenLogprobs) -> TokenLogprob:
    likely = self._likely(token, found.logprob)
    top = [self._likely(t, logprob) for t, logprob in found.top]
    return TokenLogprob(**likely.model_dump(), top_logprobs=top)

  def _likely(self, token: int, logprob: float) -> LikelyToken:
    raw = self._codec.token_bytes(token)
    return LikelyToken(token=self._word(token), logprob=logprob, bytes=[*raw])


def merged(pieces: Sequence[Piece], before: str = '') -> Piece:
  """All pieces of an answer as one."""
  return Piece(
    before + ''.join(piece.text for piece in pieces),
    [token for piece in pieces for token in piece.tokens],
    [found for piece in pieces for found in piece.logprobs],
    pieces[-1].finish_reason if pieces else None,
  )
