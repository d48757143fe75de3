# SPDX-License-Identifier: Apache-2.0
"""GGUF vocabularies of the 'llama' kind: sentencepiece BPE (Llama 2, Mistral).

Sentencepiece stores no merges but a score for each piece, and merges the pair
of the best score first. The merges that `tokenizers` wants are therefore all
the ways to split each piece into two pieces, best score first.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import Tokenizer

from mooncake_jax.model.checkpoints.gguf_file import GGUFFile

_SPACE = '\u2581'  # stands for a space inside pieces


def build(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
  """The tokenizer before its special tokens are added.

  Raises:
    ValueError: there are no scores, or not one for each token.
  """
  scores = file.require('tokenizer.ggml.scores')
  if len(scores) != len(tokens):
    raise ValueError(
      f'{file.path}: tokenizer.ggml.scores has {len(scores)} entries for '
      f'{len(tokens)} tokens'
    )
  unknown = int(file.get('tokenizer.ggml.unknown_token_id', 0))
  bpe = models.BPE(
    {text: index for index, text in enumerate(tokens)},
    list(_merges(tokens, scores)),
    unk_token=tokens[unknown],
    fuse_unk=True,
    byte_fallback=True,
  )
  prefixed = bool(file.get('tokenizer.ggml.add_space_prefix', True))
  tokenizer = Tokenizer(bpe)
  fields: Any = tokenizer  # the stubs type these as read-only
  fields.pre_tokenizer = pre_tokenizers.Metaspace(
    _SPACE, 'first' if prefixed else 'never', split=False
  )
  fields.decoder = _decoder(prefixed)
  return tokenizer


def adds_bos(file: GGUFFile) -> bool:
  """Whether bos stands before every text."""
  return bool(file.get('tokenizer.ggml.add_bos_token', True))


def _merges(
  tokens: Sequence[str], scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
  index = {text: i for i, text in enumerate(tokens)}
  for i in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
    text = tokens[i]
    halves = [(text[:n], text[n:]) for n in range(1, len(text))]
    known = [h for h in halves if h[0] in index and h[1] in index]
    yield from sorted(known, key=lambda half: (index[half[0]], index[half[1]]))


def _decoder(prefixed: bool) -> decoders.Decoder:
  steps = [
    decoders.Replace(_SPACE, ' '),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if prefixed:
    steps.append(decoders.Strip(' ', 1, 0))
  return decoders.Sequence(steps)
