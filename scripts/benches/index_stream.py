# SPDX-License-Identifier: Apache-2.0
"""What an index is told and asked while a trace is served: a list of ops.

  ('query', ids)                   how far does each worker match this prompt?
  ('stored', worker, parent, ids)  blocks of one chain, the block before them
  ('removed', worker, ids)

The ops depend on the trace alone, so that any two indexes can be given the
same. An id names a block with all before it, as a key does.
"""

from collections import defaultdict
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
import random
from typing import Any

from mooncake_jax.workload.trace import TraceRow

Op = tuple


@dataclass(frozen=True)
class Stream:
  """Ops in order, and what follows them.

  Attributes:
    num_workers: they are 0, 1, 2 …
    holes: removals of blocks in the middle of chains.
    refills: stores them again.
  """

  num_workers: int
  ops: list[Op]
  holes: list[Op]
  refills: list[Op]

  @property
  def queries(self) -> list[tuple[int, ...]]:
    return [op[1] for op in self.ops if op[0] == 'query']

  @property
  def num_queries(self) -> int:
    return len(self.queries)

  @property
  def num_stored_blocks(self) -> int:
    return sum(len(op[3]) for op in self.ops if op[0] == 'stored')

  @property
  def num_distinct_blocks(self) -> int:
    """Those that some worker holds when all ops are done."""
    return len(set().union(*_held(self.ops).values()))

  def to_dict(self) -> dict[str, Any]:
    return asdict(self)


def serving(
  rows: Sequence[TraceRow],
  num_workers: int,
  capacity_blocks: int,
  holes: float,
  seed: int = 0,
) -> Stream:
  """One query a request, then what its worker stores and evicts.

  Half of the requests go where most of their prefix lies, the others anywhere,
  so that prefixes spread. Workers evict least recently used blocks, tails
  before heads. In the end a share of blocks is lost from the middle of chains.
  """
  rng = random.Random(seed)
  caches = [OrderedDict() for _ in range(num_workers)]
  last_at: dict[int, int] = {}
  ops: list[Op] = []
  for row in rows:
    ids = row.hash_ids
    ops.append(('query', ids))
    known = [i for i in ids if i in last_at]
    follows = known and rng.random() < 0.5
    worker = last_at[known[-1]] if follows else rng.randrange(num_workers)
    ops += _store(caches[worker], worker, ids, capacity_blocks)
    last_at.update(dict.fromkeys(ids, worker))
  return Stream(num_workers, ops, *_holes(ops, holes, rng))


def scores(stream: Stream, state: str, every: int) -> list[dict[int, int]]:
  """Blocks that each worker matches of every so many queries.

  Args:
    state: 'whole' or 'refilled', or 'holey': without the lost blocks.
  """
  held = _held(stream.ops + (stream.holes if state == 'holey' else []))
  return [
    {worker: _leading(ids, blocks) for worker, blocks in held.items()}
    for ids in stream.queries[::every]
  ]


def _leading(ids: Sequence[int], blocks: set[int]) -> int:
  return next((n for n, i in enumerate(ids) if i not in blocks), len(ids))


def _held(ops: Iterable[Op]) -> dict[int, set[int]]:
  held: dict[int, set[int]] = defaultdict(set)
  for op in ops:
    if op[0] == 'stored':
      held[op[1]].update(op[3])
    elif op[0] == 'removed':
      held[op[1]].difference_update(op[2])
  return held


def _holes(
  ops: list[Op], share: float, rng: random.Random
) -> tuple[list[Op], list[Op]]:
  """Removals, and the stores that make up for them."""
  held = _held(ops)
  inner = {
    (op[1], block): parent
    for op in ops
    if op[0] == 'stored'
    for parent, block in zip((op[2], *op[3]), op[3][:-1])
    if block in held[op[1]]
  }
  lost = rng.sample(sorted(inner), int(len(inner) * share))
  return (
    [('removed', worker, (block,)) for worker, block in lost],
    [('stored', w, inner[w, block], (block,)) for w, block in sorted(lost)],
  )


def _store(
  cache: OrderedDict[int, None],
  worker: int,
  ids: tuple[int, ...],
  capacity_blocks: int,
) -> list[Op]:
  """Blocks that are new to a worker, run by run, and those that went."""
  ops: list[Op] = []
  run: list[int] = []
  before = None
  for block in ids:
    if block not in cache:
      run.append(block)
    elif run:
      ops.append(('stored', worker, before, tuple(run)))
      run = []
    if not run:
      before = block
  if run:
    ops.append(('stored', worker, before, tuple(run)))
  for block in reversed(ids):
    cache[block] = None
    cache.move_to_end(block)
  gone = []
  while len(cache) > max(capacity_blocks, len(ids)):
    gone.append(cache.popitem(last=False)[0])
  return [*ops, ('removed', worker, tuple(gone))] if gone else ops
