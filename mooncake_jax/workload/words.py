# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for models that can't talk: one token a word, by its hash.

With random weights any tokens will do, but a chat's next prompt must go on
exactly where prompt and answer ended. Here it does: a chat is role, words,
role, words, ..., 'assistant', and an answer's tokens [7, 300] read 't7 t300',
which encode to 7 and 300 again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import hashlib

from mooncake_jax.workload.session_file import Message
from mooncake_jax.workload.session_file import ROLES


@dataclass(frozen=True)
class WordCodec:
  """Encodes chats and decodes answers; use its methods in `Sessions`.

  Attributes:
    vocab_size: words go to ids below it.
    first_token: the three roles have this and the next two ids, words the
      ids after them.

  Raises:
    ValueError: no ids are left for words.
  """

  vocab_size: int
  first_token: int = 0

  def __post_init__(self):
    if not 0 <= self.first_token < self.vocab_size - len(ROLES):
      raise ValueError(
        f'WordCodec.vocab_size={self.vocab_size!r} leaves no words after '
        f'first_token={self.first_token!r} and {len(ROLES)} roles'
      )

  def encode(self, text: str) -> list[int]:
    """Token ids of plain text."""
    return [*map(self._word, text.split())]

  def encode_chat(self, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat, ending where the assistant speaks."""
    ids = []
    for message in messages:
      ids.append(self._role(message['role']))
      ids += map(self._word, message['content'].split())
    return [*ids, self._role('assistant')]

  def decode(self, ids: Sequence[int]) -> str:
    """Words that encode to these ids."""
    return ' '.join(f't{id_}' for id_ in ids)

  def token_bytes(self, token: int) -> bytes:
    """Its word's."""
    return self.decode([token]).encode()

  def _role(self, role: str) -> int:
    return self.first_token + ROLES.index(role)

  def _word(self, word: str) -> int:
    number = word[1:]
    if word[0] == 't' and word.isascii() and number.isdigit():
      if len(number) < 10 and int(number) < self.vocab_size:
        return int(number)
    words = self.first_token + len(ROLES)
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return words + int.from_bytes(digest) % (self.vocab_size - words)
