# SPDX-License-Identifier: Apache-2.0
"""A `tokenizers.Tokenizer` built from the vocabulary in a GGUF file."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import processors
from tokenizers import Tokenizer

from mooncake_jax.model.checkpoints import gguf_byte_level
from mooncake_jax.model.checkpoints import gguf_sentencepiece
from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

# tokenizer.ggml.model -> the module that knows it.
_KINDS = {'gpt2': gguf_byte_level, 'llama': gguf_sentencepiece}
# Values of tokenizer.ggml.token_type.
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4


def build(file: GGUFFile) -> Tokenizer:
  """The tokenizer of `file`; `Tokenizer.save` writes its tokenizer.json.

  Raises:
    ValueError: a vocabulary or pre-tokenizer that is not known here, or a
      list that is missing; names the file, the field and the value.
  """
  kind = file.require('tokenizer.ggml.model')
  if kind not in _KINDS:
    raise ValueError(
      f'{file.path}: tokenizer.ggml.model={kind!r} is none of {list(_KINDS)}'
    )
  tokens = file.require('tokenizer.ggml.tokens')
  tokenizer = _KINDS[kind].build(file, tokens)
  if _KINDS[kind].adds_bos(file):
    fields: Any = tokenizer  # the stubs type it as read-only
    fields.post_processor = _bos_first(file)
  _add_tokens(tokenizer, tokens, file.require('tokenizer.ggml.token_type'))
  return tokenizer


def token(file: GGUFFile, role: str) -> str | None:
  """Text of the token with `role` 'bos', 'eos', ...; None if it has none."""
  index = file.get(f'tokenizer.ggml.{role}_token_id')
  if index is None:
    return None
  tokens = file.require('tokenizer.ggml.tokens')
  if not 0 <= index < len(tokens):
    raise ValueError(
      f'{file.path}: tokenizer.ggml.{role}_token_id={index} is not below '
      f'{len(tokens)}'
    )
  return tokens[index]


def _bos_first(file: GGUFFile) -> processors.TemplateProcessing:
  index = int(file.require('tokenizer.ggml.bos_token_id'))
  bos = str(token(file, 'bos'))
  return processors.TemplateProcessing(
    single=[bos, '$A'], pair=None, special_tokens=[(bos, index)]
  )


def _add_tokens(
  tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
  """Marks the tokens that are matched in raw text before any splitting."""
  of = lambda *wanted: [  # noqa: E731
    text for text, kind in zip(tokens, kinds) if kind in wanted
  ]
  tokenizer.add_special_tokens(
    [
      AddedToken(text, special=True, normalized=False)
      for text in of(_UNKNOWN, _CONTROL)
    ]
  )
  tokenizer.add_tokens(
    [AddedToken(text, normalized=False) for text in of(_USER_DEFINED)]
  )
