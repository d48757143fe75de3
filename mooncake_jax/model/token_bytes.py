# SPDX-License-Identifier: Apache-2.0
"""The bytes of single tokens, which may end within a character.

A vocabulary writes them in one of two ways. Byte-level ones have a letter for
each byte (GPT-2's: printable bytes are themselves, the others come from 256
on); SentencePiece's have text with '▁' for a space, and '<0xE6>' for a byte.
"""

import re

import tokenizers

_FALLBACK = re.compile('<0x([0-9A-F]{2})>')
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class TokenBytes:
  """Of all tokens of a tokenizer."""

  def __init__(self, backend: tokenizers.Tokenizer):
    """Reads how its vocabulary is written from how it decodes."""
    self._backend = backend
    self._added = backend.get_added_tokens_decoder()
    decoder = backend.decoder
    # Its fields, as JSON: there is no other way to see into a sequence.
    written = b'' if decoder is None else decoder.__getstate__()
    self._is_byte_level = b'"ByteLevel"' in written

  def of(self, token: int) -> bytes:
    """Added tokens by their names; nothing of an id that is no token."""
    if token in self._added:
      return self._added[token].content.encode()
    piece = self._backend.id_to_token(token)
    if piece is None:
      return b''
    if self._is_byte_level:
      return bytes(_BYTES[letter] for letter in piece)
    if found := _FALLBACK.fullmatch(piece):
      return bytes.fromhex(found[1])
    return piece.replace('▁', ' ').encode()
