# SPDX-License-Identifier: Apache-2.0
"""Stop strings end text at the same place wherever tokens end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
import pytest

from mooncake_jax.gateway.answers import Answer
from mooncake_jax.gateway.choice import Piece
from mooncake_jax.gateway.schema import CompletionRequest
from mooncake_jax.gateway.text_stream import TextStream
from mooncake_jax.gateway.writing import TextWriter
from mooncake_jax.model.tokenizer import Tokenizer
from mooncake_jax.request import TokenLogprobs


def decode(tokens) -> str:
  """A token a byte, as byte-level tokenizers have them."""
  return bytes(tokens).decode('utf-8', errors='replace')


def spell(tokens) -> str:
  """A token a word; a first one has no space before it."""
  return ' '.join(f'{chr(97 + token % 3)}{token}' for token in tokens)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.data())
def test_words_come_as_they_are_spelt_together(tokens, data):
  """However long the answer is, and though only its end is looked at."""
  stop = data.draw(st.sampled_from([(), ('b4 c', '0 a'), ('c29',)]))
  stream, shown = TextStream(spell, stop), ''
  for token in tokens:
    shown += stream.push([token])
  expected, found = cut(spell(tokens), stop)
  assert (shown + stream.end(), stream.stopped) == (expected, found)


def cut(text: str, stops) -> tuple[str, str | None]:
  """Character by character: the text before the first whole stop string."""
  for end in range(1, len(text) + 1):
    whole = [s for s in stops if text[:end].endswith(s)]
    if whole:
      stop = max(whole, key=len)
      return text[: end - len(stop)], stop
  return text, None


@given(
  st.text('abé', max_size=30),
  st.lists(st.text('abé', min_size=1, max_size=4), max_size=3),
  st.lists(st.integers(1, 5), min_size=1),
)
def test_text_ends_before_the_first_stop_string(text, stops, sizes):
  tokens = list(text.encode())
  stream, shown, at = TextStream(decode, stops), '', 0
  while at < len(tokens):
    size = sizes[at % len(sizes)]
    shown += stream.push(tokens[at : at + size])
    at += size
    assert text.startswith(shown)
  expected, stop = cut(text, stops)
  assert stream.stopped == stop
  assert shown + stream.end() == expected


def test_only_what_may_become_a_stop_string_is_held_back():
  stream = TextStream(decode, ['END'])
  assert stream.push(b'An E') == 'An '
  assert stream.push(b'l') == 'El'
  assert stream.push(b'EN') == ''
  assert stream.push(b'D and more') == ''
  assert stream.stopped == 'END'
  assert stream.push(b'x') == stream.end() == ''


def test_half_a_character_waits_for_the_other_half():
  stream = TextStream(decode)
  first, second = 'é'.encode()
  assert stream.push([first]) == ''
  assert stream.push([second]) == 'é'


def test_an_empty_stop_string_is_refused():
  with pytest.raises(ValueError, match='empty string'):
    TextStream(decode, ['a', ''])


def test_tokens_that_end_within_a_character_are_told_by_their_bytes():
  """All were U+FFFD: alternatives took each other's place in `top_logprobs`."""
  codec = Tokenizer.from_folder(Path(__file__).parent / 'data/tiny_tokenizer')
  tokens = codec.encode('é日!')
  likely = TokenLogprobs(-1.0, tuple((token, -2.0) for token in tokens))
  body = CompletionRequest(model='m', prompt='', logprobs=5)
  writer = TextWriter(body, codec, Answer(id='a', created=0, model='m'))
  piece = Piece('é日!', tokens, [likely] * len(tokens), None)
  first: Any = SimpleNamespace(index=0)
  told = writer._logprobs(first, piece)
  assert told is not None
  assert told.tokens == ['é', *(f'bytes:\\x{b:x}' for b in '日'.encode()), '!']
  assert told.text_offset == [0, 1, 1, 1, 2]
  assert told.top_logprobs and told.top_logprobs[0]
  assert [*told.top_logprobs[0]] == told.tokens
