# SPDX-License-Identifier: Apache-2.0
"""LRU stack distances: one pass gives the hits of every capacity.

The distance of a block is the tokens of all distinct blocks used since its last
use, itself included: an LRU store hits it if and only if it holds so many
(Mattson et al., 1970). A prompt uses its tail before its head, as the store
does, so a head is never further away than its tail and what a capacity hits
is a prefix.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake_jax.assess.chains import Chain


class Hits(NamedTuple):
  """What of one prompt was there before.

  Attributes:
    tokens: int64 [n], of its leading links; [] if none.
    distance_tokens: int64 [n], the least capacity that hits each.
    last_used: int64 [n], index of the prompt that used each last.
  """

  tokens: np.ndarray
  distance_tokens: np.ndarray
  last_used: np.ndarray


def stack_hits(chains: Sequence[Chain], num_links: int) -> Iterator[Hits]:
  """The hits of each prompt in order, in a store without bounds."""
  weights = _weights(chains, num_links)
  kept = _Recency(sum(len(chain.links) for chain in chains))
  position = np.full(num_links, -1, np.int64)
  covered = np.zeros(num_links, np.int64)
  user = np.zeros(num_links, np.int64)
  for index, chain in enumerate(chains):
    links = chain.links
    tokens = leading_tokens(chain, covered[links])
    hit = links[: len(tokens)]
    yield Hits(tokens, kept.tokens_since(position[hit]), user[hit])
    seen = links[position[links] >= 0]
    kept.remove(position[seen], weights[seen])
    position[links[::-1]] = kept.append(weights[links[::-1]])
    covered[links] = np.maximum(covered[links], chain.tokens)
    user[links] = index


def _weights(chains: Sequence[Chain], num_links: int) -> np.ndarray:
  """Tokens of each link: the most that any prompt has of it."""
  weights = np.zeros(num_links, np.int64)
  for chain in chains:
    weights[chain.links] = np.maximum(weights[chain.links], chain.tokens)
  return weights


def leading_tokens(chain: Chain, covered: np.ndarray) -> np.ndarray:
  """Tokens that a prompt can reuse of each link, up to the first it can't.

  covered [512, 512, 128, 0], chain of [512, 512, 512, 512] tokens, of which
  1,100 are usable -> [512, 512, 76].

  Args:
    covered: int64 [n], tokens of each of its links that were there before.
  """
  there = np.minimum(chain.tokens, covered)
  short = np.flatnonzero(there < chain.tokens)
  tokens = there[: short[0] + 1 if len(short) else len(there)]
  before = np.cumsum(tokens) - tokens
  tokens = np.clip(chain.usable_tokens - before, 0, tokens)
  return tokens[: int(np.count_nonzero(tokens))]


class _Recency:
  """Tokens by order of last use, as a Fenwick tree."""

  def __init__(self, num_uses: int):
    self._tree = np.zeros(num_uses + 1, np.int64)
    self._next = 0
    self._total = 0

  def append(self, tokens: np.ndarray) -> np.ndarray:
    """Puts each at the recent end, in order; returns where they are."""
    at = np.arange(self._next, self._next + len(tokens))
    self._next += len(tokens)
    self._add(at, tokens)
    return at

  def remove(self, at: np.ndarray, tokens: np.ndarray) -> None:
    self._add(at, -tokens)

  def tokens_since(self, at: np.ndarray) -> np.ndarray:
    """Of all from each position on to the recent end."""
    before, at = np.zeros(len(at), np.int64), at.copy()
    while at.any():
      before += self._tree[at]
      at &= at - 1
    return self._total - before

  def _add(self, at: np.ndarray, tokens: np.ndarray) -> None:
    self._total += int(tokens.sum())
    at = at + 1
    while len(at):
      np.add.at(self._tree, at, tokens)
      at = at + (at & -at)
      inside = at < len(self._tree)
      at, tokens = at[inside], tokens[inside]
