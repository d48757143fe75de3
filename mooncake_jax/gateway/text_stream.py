# SPDX-License-Identifier: Apache-2.0
"""Text of one answer as its tokens come, up to the first stop string.

Stop strings are of text, and text has other borders than tokens: 'END' may
come as 'E', 'ND.'. So what could be the beginning of one is held back until
more has come. So is a character of which only some bytes are there.
"""

from collections.abc import Callable
from collections.abc import Sequence

# What a tokenizer decodes a part of a character to.
INCOMPLETE = '\N{REPLACEMENT CHARACTER}'
# Tokens that are decoded again with each new one: what a tokenizer makes of a
# token goes by its neighbours, not by the whole answer.
CONTEXT_TOKENS = 8


class TextStream:
  """Turns tokens into text that may be shown.

  Attributes:
    stopped: the stop string that ended it, or None. The tokens after it
      mean nothing: whoever sees it cancels the request.
  """

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()
  ):
    """`decode` makes text of tokens; a stop string is not shown.

    Raises:
      ValueError: an empty stop string.
    """
    if not all(stop):
      raise ValueError(f'TextStream: {stop=} has an empty string')
    self._decode = decode
    self._stop = tuple(stop)
    # The last tokens, and how much of their text was shown.
    self._tokens: list[int] = []
    self._shown = 0
    self.stopped: str | None = None

  def push(self, tokens: Sequence[int]) -> str:
    """The text that these tokens add to what may be shown."""
    if self.stopped is not None:
      return ''
    self._tokens += tokens
    text = self._decode(self._tokens)
    starts = {s: text.find(s, self._shown) for s in self._stop}
    ends = {s: at + len(s) for s, at in starts.items() if at >= 0}
    if ends:
      # The first to be whole, wherever tokens end; of equals the longest.
      self.stopped = min(ends, key=lambda s: (ends[s], -len(s)))
      return self._show(text, starts[self.stopped])
    shown = self._show(text, len(text) - self._held_back(text))
    if len(self._tokens) > 2 * CONTEXT_TOKENS:
      self._forget(text)
    return shown

  def end(self) -> str:
    """What was held back: no more tokens come."""
    if self.stopped is not None:
      return ''
    text = self._decode(self._tokens)
    return self._show(text, len(text))

  def _show(self, text: str, stop: int) -> str:
    start, self._shown = self._shown, max(stop, self._shown)
    return text[start : self._shown]

  def _forget(self, text: str) -> None:
    """Lets tokens go whose text was shown, where the rest reads the same."""
    last = self._tokens[-CONTEXT_TOKENS:]
    rest = self._decode(last)
    gone = len(text) - len(rest)
    if text.endswith(rest) and gone <= self._shown:
      self._tokens, self._shown = last, self._shown - gone

  def _held_back(self, text: str) -> int:
    """Characters at the end that more tokens may change or make a stop."""
    cut = len(text) - len(text.rstrip(INCOMPLETE))
    whole = text[: len(text) - cut]
    longest = max(map(len, self._stop), default=1) - 1
    for n in range(min(longest, len(whole)), 0, -1):
      if any(s.startswith(whole[-n:]) for s in self._stop):
        return cut + n
    return cut
