# SPDX-License-Identifier: Apache-2.0
"""Prompts as chains of blocks, for any block size, without their tokens.

A trace names T tokens with an id. For blocks of B <= T tokens an id is one
link of a prompt's chain that stands for T / B blocks at once; for B > T a link
is the B / T ids that end with it. So the work goes with ids, not with blocks:

  T = 512, B = 128, a prompt of 700 tokens with ids [0, 7]:
    links (0) and (0, 7), of 512 and 128 tokens; 60 tokens are in no block

Two prompts share a link where they share all before it as well, and have one
tenant. Of blocks smaller than T a trace tells less than there is to know: two
prompts that part within an id share none of it here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake_jax.workload.trace import TraceRow


class Chain(NamedTuple):
  """One prompt.

  Attributes:
    links: int64 [n], a number for each link, equal where they are shared.
    tokens: int64 [n], tokens of complete blocks in each.
    usable_tokens: of these, what a hit may save: the last token is computed.
  """

  links: np.ndarray
  tokens: np.ndarray
  usable_tokens: int


def chains(
  rows: Sequence[TraceRow], tokens_per_hash_id: int, block_size_tokens: int
) -> tuple[list[Chain], int]:
  """The rows' chains in their order, and how many links there are.

  Raises:
    ValueError: neither size divides the other.
  """
  long, short = tokens_per_hash_id, block_size_tokens
  if max(long, short) % min(long, short):
    raise ValueError(
      f'{block_size_tokens=} must divide {tokens_per_hash_id=} or be a '
      'multiple of it'
    )
  numbers: dict[tuple[int | str, int], int] = {}
  found = []
  for row in rows:
    parent: int | str = row.tenant
    links = []
    for hash_id in row.hash_ids:
      parent = numbers.setdefault((parent, hash_id), len(numbers))
      links.append(parent)
    found.append(
      _chain(row.input_tokens, links, tokens_per_hash_id, block_size_tokens)
    )
  return found, len(numbers)


def _chain(num_tokens: int, links: list[int], per_id: int, size: int) -> Chain:
  usable = (num_tokens - 1) // size * size
  if size > per_id:
    every, blocks = size // per_id, num_tokens // size
    kept = np.array(links[every - 1 :: every][:blocks], np.int64)
    return Chain(kept, np.full(len(kept), size, np.int64), usable)
  tokens = np.full(len(links), per_id, np.int64)
  tokens[-1] = (num_tokens - (len(links) - 1) * per_id) // size * size
  kept = tokens > 0
  return Chain(np.array(links, np.int64)[kept], tokens[kept], usable)
