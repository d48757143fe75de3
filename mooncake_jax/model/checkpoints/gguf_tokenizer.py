# SPDX-License-Identifier: Apache-2.0
"""A `tokenizers.Tokenizer` built from the vocabulary in a GGUF file.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) and leaves its meaning to
the reader; the table below gives it for the families served here.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import Regex
from tokenizers import Tokenizer

from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

# Values of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_DIGITS = ('smollm', 'starcoder', 'refact', 'command-r')


def build(file: GGUFFile) -> Tokenizer:
  """The tokenizer of `file`; `Tokenizer.save` writes its tokenizer.json.

  Raises:
    ValueError: a vocabulary or pre-tokenizer that is not known here, or a
      list that is missing; names the file, the field and the value.
  """
  kind = file.require('tokenizer.ggml.model')
  if kind != 'gpt2':
    raise ValueError(
      f"{file.path}: tokenizer.ggml.model={kind!r} must be 'gpt2' (byte-level "
      'BPE); use the tokenizer.json of this model'
    )
  tokens = file.require('tokenizer.ggml.tokens')
  pre = str(file.get('tokenizer.ggml.pre', 'gpt-2'))
  tokenizer = Tokenizer(_bpe(file, tokens, pre))
  # The stubs type these as read-only.
  fields: Any = tokenizer
  fields.pre_tokenizer = _pre_tokenizer(file.path, pre)
  fields.decoder = decoders.ByteLevel()
  if pre == 'qwen2':
    fields.normalizer = normalizers.NFC()
  if file.get('tokenizer.ggml.add_bos_token', pre == 'llama-bpe'):
    fields.post_processor = _bos_first(file, tokens)
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


def _bpe(file: GGUFFile, tokens: Sequence[str], pre: str) -> models.BPE:
  merges = file.require('tokenizer.ggml.merges')
  vocab = {text: index for index, text in enumerate(tokens)}
  for merge in merges:
    left, _, right = merge.partition(' ')
    if not (left in vocab and right in vocab and left + right in vocab):
      raise ValueError(
        f'{file.path}: tokenizer.ggml.merges has {merge!r}, which does not '
        'make a token of two tokens'
      )
  pairs = [tuple(merge.split(' ', 1)) for merge in merges]
  return models.BPE(vocab, pairs, ignore_merges=pre == 'llama-bpe')


def _pre_tokenizer(path: str, pre: str) -> pre_tokenizers.PreTokenizer:
  if pre == 'gpt-2':
    return pre_tokenizers.ByteLevel(add_prefix_space=False)
  if pre in _DIGITS:
    return pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
    )
  counts = {'qwen2': '', 'llama-bpe': '{1,3}'}
  if pre not in counts:
    known = ['gpt-2', *_DIGITS, *counts]
    raise ValueError(f'{path}: tokenizer.ggml.pre={pre!r} is none of {known}')
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(_WORDS % counts[pre]), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _bos_first(
  file: GGUFFile, tokens: Sequence[str]
) -> processors.TemplateProcessing:
  index = int(file.require('tokenizer.ggml.bos_token_id'))
  bos = tokens[index]
  return processors.TemplateProcessing(
    single=[bos, '$A'], pair=None, special_tokens=[(bos, index)]
  )


def _add_tokens(
  tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
  """Marks the tokens that are matched in raw text before any splitting."""
  control = [t for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
  tokenizer.add_special_tokens(
    [AddedToken(t, special=True, normalized=False) for t in control]
  )
  defined = [
    t for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED
  ]
  tokenizer.add_tokens([AddedToken(t, normalized=False) for t in defined])
