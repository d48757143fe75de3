# SPDX-License-Identifier: Apache-2.0
"""How much of a trace's prompts one segment of the Master would have had."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_jax.store.eviction import lru
from mooncake_jax.store.eviction import Policy
from mooncake_jax.store.master import Master
from mooncake_jax.workload.trace import TOKENS_PER_HASH_ID
from mooncake_jax.workload.trace import TraceRow

POOL = 'pool'
NO_LEASE_S = 1e-6  # over before the next request


@dataclass(frozen=True)
class Hits:
  """Shares of prompt tokens found: over all tokens, and mean of requests."""

  by_token: float
  by_request: float


def chain_of(row: TraceRow, partial: bool) -> list[bytes]:
  """Keys of its complete blocks, with `partial` of a partial tail too."""
  full = row.input_tokens // TOKENS_PER_HASH_ID
  ids = row.hash_ids if partial else row.hash_ids[:full]
  return [i.to_bytes(8, 'big') for i in ids]


def exact(
  rows: Sequence[TraceRow], capacity_blocks: int, policy: Policy = lru
) -> Hits:
  """One request after another, in one call for each of its steps.

  Every started block has a key and takes one slot; a full segment evicts one
  block for one; no lease outlives its request, and no block of a request goes
  for another of it.
  """
  master = _exact_master(capacity_blocks, policy)
  found = []
  for time_s, row in enumerate(rows):
    chain = chain_of(row, partial=True)
    found.append(len(master.get_chain(chain, time_s, POOL)))
    put(master, chain, found[-1], time_s)
  return _hits(rows, found)


def exact_block_by_block(
  rows: Sequence[TraceRow], capacity_blocks: int, policy: Policy = lru
) -> Hits:
  """As `exact`, but each block on its own, heads before tails.

  A request first uses those of its blocks that are there, then puts the
  others, and any of its own may go for the next of it. This is the LFU of the
  published table: there ties go by the order of uses, heads first, and a
  block's count starts anew when it is put again.
  """
  master = _exact_master(capacity_blocks, policy)
  found, time_s = [], 0
  for row in rows:
    chain = chain_of(row, partial=True)
    there = [master.exists(key) for key in chain]
    found.append([*there, False].index(False))
    for key in [key for key, is_there in zip(chain, there) if is_there]:
      time_s += 1
      master.get_chain((key,), time_s, POOL)
    for key in [key for key, is_there in zip(chain, there) if not is_there]:
      time_s += 1
      start = master.put_start(key, 1, POOL, time_s)
      if start.replica is not None:
        master.put_end(key, start.replica)
  return _hits(rows, found)


def default(
  rows: Sequence[TraceRow], capacity_blocks: int, policy: Policy = lru
) -> Hits:
  """As the engine runs it: complete blocks, watermark, batches and leases."""
  master = Master(policy=policy)
  master.mount(POOL, capacity_blocks)
  found = []
  for row in rows:
    chain = chain_of(row, partial=False)
    found.append(len(master.get_chain(chain, row.timestamp_s, POOL)))
    put(master, chain, found[-1], row.timestamp_s)
  return _hits(rows, found)


def put(
  master: Master, chain: Sequence[bytes], first: int, time_s: float
) -> None:
  """Puts what is new from block `first` on, and uses the chain as a whole."""
  start = master.put_start_chain(chain, first, len(chain), 1, POOL, time_s)
  master.put_end_chain(start.replicas)
  master.touch(chain, POOL)


def _exact_master(capacity_blocks: int, policy: Policy) -> Master:
  master = Master(NO_LEASE_S, 1.0, 0.0, policy)
  master.mount(POOL, capacity_blocks)
  return master


def _hits(rows: Sequence[TraceRow], found_blocks: Sequence[int]) -> Hits:
  tokens = [
    min(blocks * TOKENS_PER_HASH_ID, row.input_tokens)
    for row, blocks in zip(rows, found_blocks)
  ]
  shares = [n / row.input_tokens for row, n in zip(rows, tokens)]
  total = sum(row.input_tokens for row in rows)
  return Hits(sum(tokens) / total, sum(shares) / len(shares))
