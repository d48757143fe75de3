# SPDX-License-Identifier: Apache-2.0
"""GGUF vocabularies of the 'gpt2' kind: byte-level BPE (Llama 3, Qwen, ...).

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) and leaves its meaning to
the reader; the table below gives it for the families served here.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import Regex
from tokenizers import Tokenizer

from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# How many digits make a word where _WORDS splits.
_DIGITS_A_WORD = {'qwen2': '', 'llama-bpe': '{1,3}'}
_DIGITS_ALONE = ('smollm', 'starcoder', 'refact', 'command-r')


def build(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
  """The tokenizer before its special tokens are added.

  Raises:
    ValueError: an unknown pre-tokenizer, or a merge of what is no token.
  """
  pre = str(file.get('tokenizer.ggml.pre', 'gpt-2'))
  tokenizer = Tokenizer(_bpe(file, tokens, pre))
  fields: Any = tokenizer  # the stubs type these as read-only
  fields.pre_tokenizer = _pre_tokenizer(file.path, pre)
  fields.decoder = decoders.ByteLevel()
  if pre == 'qwen2':
    fields.normalizer = normalizers.NFC()
  return tokenizer


def adds_bos(file: GGUFFile) -> bool:
  """Whether bos stands before every text."""
  default = file.get('tokenizer.ggml.pre') == 'llama-bpe'
  return bool(file.get('tokenizer.ggml.add_bos_token', default))


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
  if pre in _DIGITS_ALONE:
    return pre_tokenizers.Sequence(
      [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
      ]
    )
  if pre not in _DIGITS_A_WORD:
    known = ['gpt-2', *_DIGITS_ALONE, *_DIGITS_A_WORD]
    raise ValueError(f'{path}: tokenizer.ggml.pre={pre!r} is none of {known}')
  words = Regex(_WORDS % _DIGITS_A_WORD[pre])
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(words, 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
