# SPDX-License-Identifier: Apache-2.0
"""Text and tokens, as a server needs them of whatever tokenizer there is."""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

# Of a simulation's answers, whose tokens nobody computes.
WORDS = 'the of and to in a is that for it was on are as with they be at'


class Codec(Protocol):
  """A tokenizer; `model.tokenizer.Tokenizer` and `WordCodec` are."""

  def encode(self, text: str) -> list[int]: ...

  def encode_chat(self, messages: Sequence[Any]) -> list[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def token_bytes(self, token: int) -> bytes: ...


def placeholders(codec: Codec) -> tuple[int, ...]:
  """Tokens of plain words, one a word, that a simulation answers with."""
  ids = codec.encode(' ' + WORDS)
  return tuple(dict.fromkeys(ids)) or (0,)
