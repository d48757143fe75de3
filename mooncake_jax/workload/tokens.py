# SPDX-License-Identifier: Apache-2.0
"""Trace rows become token ids and block keys, the same ones every time.

A trace tells which blocks prompts share, not what they say. So every hash id
is given `tokens_per_hash_id` random tokens that depend on the seed and the id
alone, and a prompt is the blocks of its ids one after another, the last one
cut. Prompts then share tokens exactly as far as they share ids: the engine,
which sees tokens, finds the reuse that the simulator, which sees ids, finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
import hashlib

import numpy as np

from mooncake_jax.blocks.keys import prefix_keys
from mooncake_jax.costs.model import check_count
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request
from mooncake_jax.request import Sampling
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow


@dataclass(frozen=True)
class TokenMaker:
  """Makes the tokens of hash ids.

  Attributes:
    vocab_size: tokens are drawn from [first_token, vocab_size).
    first_token: lower ids are left out (special tokens of most vocabularies).
    excluded_tokens: ids left out besides, wherever they are.
    tokens_per_hash_id: tokens a hash id stands for.
    seed: other seed, other tokens.

  Raises:
    ValueError: fewer than two tokens are left, a count below 1.
  """

  vocab_size: int
  first_token: int = 0
  excluded_tokens: tuple[int, ...] = ()
  tokens_per_hash_id: int = TOKENS_PER_HASH_ID
  seed: int = 0

  def __post_init__(self):
    check_count('TokenMaker.vocab_size', self.vocab_size)
    check_count('TokenMaker.tokens_per_hash_id', self.tokens_per_hash_id)
    for name in ('first_token', 'seed'):
      value = getattr(self, name)
      if not 0 <= value < 2**63:
        raise ValueError(f'TokenMaker.{name}={value!r} must be >= 0')
    if self._num_choices < 2:
      raise ValueError(
        f'TokenMaker.vocab_size={self.vocab_size} leaves '
        f'{self._num_choices} tokens, must be >= 2 '
        f'(first_token={self.first_token})'
      )

  def prompt(self, row: TraceRow) -> np.ndarray:
    """The prompt of a row: int32 [input_tokens]."""
    size = self.tokens_per_hash_id
    last = len(row.hash_ids) - 1
    tail = row.input_tokens - last * size
    blocks = [
      self.block(hash_id, tail if i == last else size)
      for i, hash_id in enumerate(row.hash_ids)
    ]
    return np.concatenate(blocks)

  def block(self, hash_id: int, num_tokens: int) -> np.ndarray:
    """The first `num_tokens` tokens of an id: int32 [num_tokens]."""
    key = np.array([self.seed, hash_id], np.uint64)
    # Raw words: numpy keeps this stream the same over versions. The modulo's
    # bias is below 2**-32.
    words = np.random.Philox(key=key).random_raw(num_tokens)
    tokens = (words % np.uint64(self._num_choices)).astype(np.int32)
    tokens += np.int32(self.first_token)
    for excluded in self._excluded:
      # Step over it: of [10, 15) without 12, draw 2 becomes 13.
      tokens += tokens >= np.int32(excluded)
    return tokens

  @cached_property
  def _excluded(self) -> tuple[int, ...]:
    """Excluded ids inside the range, ascending."""
    inside = range(self.first_token, self.vocab_size)
    return tuple(sorted({t for t in self.excluded_tokens if t in inside}))

  @property
  def _num_choices(self) -> int:
    return self.vocab_size - self.first_token - len(self._excluded)


def trace_block_keys(
  row: TraceRow,
  tokens_per_hash_id: int,
  block_size_tokens: int,
  salt: str | None = None,
) -> tuple[BlockKey, ...]:
  """Keys of the prompt's complete blocks, without making its tokens.

  A 32-byte chain over the hash ids that each block touches. Block i covers
  tokens [i * size, (i + 1) * size), so with 32 tokens an id and blocks of 48
  it touches ids [0, 1], [1, 2], [3, 4], ... Two keys are equal if and only if
  the made prompts agree up to the block's end, as `prefix_keys` of the tokens
  would be; but for chance, where a block holds only n tokens of an id, of
  choices**-n. Any block size goes, whether or not it divides or is divided.
  `salt` separates one tenant's blocks from all others'.

  Raises:
    ValueError: a size below 1.
  """
  check_count('block_size_tokens', block_size_tokens)
  check_count('tokens_per_hash_id', tokens_per_hash_id)
  ids = np.array(row.hash_ids, '>u8').tobytes()
  key = hashlib.sha256(
    f'trace {tokens_per_hash_id} {block_size_tokens} {salt or ""}'.encode()
  ).digest()
  keys = []
  size = block_size_tokens
  for stop in range(size, row.input_tokens + 1, size):
    first = (stop - size) // tokens_per_hash_id
    last = (stop - 1) // tokens_per_hash_id
    key = hashlib.sha256(key + ids[8 * first : 8 * last + 8]).digest()
    keys.append(key)
  return tuple(keys)


def to_requests(
  rows: Sequence[TraceRow],
  *,
  block_size_tokens: int,
  tokens_per_hash_id: int = TOKENS_PER_HASH_ID,
  maker: TokenMaker | None = None,
  identity: str = '0',
  sampling: Sampling | None = None,
  tenant: str = '',
) -> list[Request]:
  """Requests of a trace in order of arrival, named by their row's index.

  Args:
    rows: of a trace, see `workload.scale`.
    block_size_tokens: of the store; its blocks are what keys name.
    tokens_per_hash_id: of these rows.
    maker: makes the prompts' tokens; None leaves them out, for a simulation
      from lengths. Its tokens_per_hash_id must be that of the rows.
    identity: of block keys made from tokens (model and KV dtype).
    sampling: of all requests; None is greedy.
    tenant: of requests whose rows name none; a salt of their block keys if
      not ''.

  Raises:
    ValueError: maker and rows differ in tokens_per_hash_id.
  """
  if maker is not None and maker.tokens_per_hash_id != tokens_per_hash_id:
    raise ValueError(
      f'TokenMaker.tokens_per_hash_id={maker.tokens_per_hash_id} but the rows '
      f'have {tokens_per_hash_id=}'
    )
  requests = []
  for i, row in enumerate(rows):
    salt = row.tenant or tenant or None
    prompt = None if maker is None else maker.prompt(row)
    if prompt is None:
      keys = trace_block_keys(row, tokens_per_hash_id, block_size_tokens, salt)
    else:
      keys = prefix_keys(prompt, block_size_tokens, identity, salt=salt)
    requests.append(
      Request(
        request_id=f'row{i}',
        arrival_s=row.timestamp_s,
        num_prompt_tokens=row.input_tokens,
        max_output_tokens=row.output_tokens,
        block_keys=keys,
        prompt=prompt,
        sampling=sampling or Sampling(),
        tenant=salt or '',
        identity=identity,
        reuse_known=row.hashed,
      )
    )
  return sorted(requests, key=lambda request: request.arrival_s)
