# SPDX-License-Identifier: Apache-2.0
"""Moves between a CPU's pool and host memory, in as few steps as there can be.

There both are the same memory, so a block is copied once, by the thread that
owns the pool, and no link has anything to do. It copies several blocks of a
work in a turn; layer ranges of one block go as one, and are kept and counted as
what they are.

What streams, crosses stages, has a checksum to be made or verified, or comes
from or goes to other memory takes the ways of `routes.py`.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
import itertools
import time
from typing import Any
from typing import NamedTuple

import numpy as np

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.instance import Instance
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.tasks import Desk
from mooncake_jax.engine.tasks import GatherTask
from mooncake_jax.engine.tasks import ScatterTask
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.heads import HeadSlices
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.worker import LinkCount

Bundle = list[OpRun]  # of one work, source and destination; layers adjoin

# What an owner thread copies in a turn; ten milliseconds at most.
TURN_BYTES = 128 << 20


class CpuMoves:
  """Carries what it can. Any thread may call."""

  def __init__(
    self,
    book: TransferBook,
    instances: Mapping[str, Instance],
    token_layer_bytes: int,
  ):
    """Makes it for the instances of a backend, by name."""
    self._book = book
    self._instances = instances
    self._token_layer_bytes = token_layer_bytes

  def start(self, runs: Sequence[OpRun]) -> list[OpRun]:
    """Sends ops on their way; returns those that it can't carry."""
    left: list[OpRun] = []
    for turn in _turns(_bundles(runs)):
      src, dst = turn[0][0].op.src, turn[0][0].op.dst
      if isinstance(src, DevicePages) and isinstance(dst, Replica):
        left += self._out(turn, src, dst)
      elif isinstance(src, Replica) and isinstance(dst, DevicePages):
        left += self._in(turn, src, dst)
      else:
        left += itertools.chain(*turn)
    return left

  def _stage(self, name: str) -> Stage | None:
    """An instance's only stage, if its pool is a CPU's memory."""
    instance = self._instances.get(name)
    if instance is None or len(instance.stages) > 1:
      return None
    stage = instance.stages[0]
    return stage if stage.desk.pool.can_copy_now else None

  # Out of the pool.

  def _out(
    self, turn: list[Bundle], src: DevicePages, dst: Replica
  ) -> list[OpRun]:
    """Has the blocks copied out; returns what it can't carry."""
    runs = [*itertools.chain(*turn)]
    stage, to = self._stage(src.instance), self._instances.get(dst.segment)
    if stage is None or to is None or to.spec.checksums == 'all':
      return runs
    if self._stage(dst.segment) is None:
      return runs
    for run in runs:
      run.num_pieces = 1
    parts = partial(self._singly, runs, stage, to) if len(runs) > 1 else None
    stage.post(self._gather(turn, stage, to, parts))
    return []

  def _singly(
    self, runs: Iterable[OpRun], stage: Stage, to: Instance
  ) -> list[GatherTask]:
    return [self._gather([[run]], stage, to) for run in runs]

  def _gather(
    self,
    turn: list[Bundle],
    stage: Stage,
    to: Instance,
    parts: Callable[[], list[GatherTask]] | None = None,
  ) -> GatherTask:
    runs = [*itertools.chain(*turn)]
    sources = [bundle[0].op.src for bundle in turn]
    pages = tuple(s.pages for s in sources if isinstance(s, DevicePages))
    num_bytes = sum(run.op.num_bytes for run in runs)
    gather = _Gather(self._book, turn, stage, to, num_bytes)
    return GatherTask(
      tuple(itertools.chain(*pages)),
      turn[0][0].op.start_layer,
      turn[0][-1].op.stop_layer,
      num_bytes,
      runs[0].work.priority,
      partial(_any_live, runs),
      gather.begin,
      gather.gathered,
      partial(self._fail, runs),
      num_blocks=len(turn),
      parts=parts,
    )

  # Into the pool.

  def _in(
    self, turn: list[Bundle], src: Replica, dst: DevicePages
  ) -> list[OpRun]:
    """Has the blocks written into pages; returns what it can't carry."""
    stage, at = self._stage(dst.instance), self._instances.get(src.segment)
    if stage is None or at is None or self._stage(src.segment) is None:
      return [*itertools.chain(*turn)]
    to, left, pieces = self._instances[dst.instance], [], []
    for run in itertools.chain(*turn):
      try:
        made = self._pieces(run, stage, at, to)
      except (LookupError, ValueError) as error:
        self._fail([run], error)
        continue
      if made is None:
        left.append(run)
      else:
        run.num_pieces = len(made)
        pieces += made
    if pieces:
      stage.post(_Scatters(self._book, pieces, to, self._fail))
    return left

  def _pieces(
    self, run: OpRun, stage: Stage, at: Instance, to: Instance
  ) -> 'list[_Piece] | None':
    """What is to be written; None if some of it must be verified first."""
    op, pieces = run.op, []
    assert isinstance(op.src, Replica) and isinstance(op.dst, DevicePages)
    pages = op.dst.pages
    num_tokens = len(pages) * to.page_tokens
    for part in at.segment.read(
      op.src.replica_id, op.start_layer, op.stop_layer
    ):
      if part.total is not None:
        return None
      arrays = tuple(map(np.asarray, part.slices))
      if arrays[0].shape[2] != num_tokens:
        held = arrays[0].shape[2]
        raise ValueError(f'{held} tokens to {len(pages)} pages')
      first = max(op.start_layer, part.start_layer)
      last = min(op.stop_layer, part.stop_layer)
      layers = (first - part.start_layer, last - part.start_layer)
      place = stage.device_place
      moved = [arrays[i] for i in place.sources(len(arrays))]
      block, local = place.arrived(moved, len(arrays), to.num_kv_heads, layers)
      assert local is not None
      num_bytes = num_tokens * (last - first) * self._token_layer_bytes
      pieces.append(_Piece(run, pages, first, block, local, num_bytes))
    return pieces

  def _fail(self, bundle: Iterable[OpRun], error: Exception) -> None:
    for run in bundle:
      self._book.end(run, 'failed', describe(error))


@dataclass(eq=False, slots=True)
class _Gather:
  """One copy out of the pool for the ops of some blocks."""

  book: TransferBook
  turn: list[Bundle]
  stage: Stage
  to: Instance
  num_bytes: int

  def begin(self) -> bool:
    return bool(self.book.begin_all(itertools.chain(*self.turn)))

  def gathered(self, seconds: float, *blocks: HeadSlices) -> None:
    """The segment keeps what was copied, op by op."""
    self.stage.desk.staging.give(self.num_bytes)
    pieces = []
    for bundle, slices in zip(self.turn, blocks, strict=True):
      pieces += self._pieces(bundle, tuple(map(np.asarray, slices)))
    self.to.host_link.add_count(LinkCount(busy_s=seconds))
    self.book.commit_all(pieces, self.to.host_link.add_count)

  def _pieces(
    self, bundle: Bundle, arrays: HeadSlices
  ) -> Iterator[tuple[OpRun, Callable[[], None], int]]:
    first = bundle[0].op.start_layer
    for run in bundle:
      dst, layers = run.op.dst, (run.op.start_layer, run.op.stop_layer)
      assert isinstance(dst, Replica)
      own = arrays
      if len(bundle) > 1:
        within = slice(layers[0] - first, layers[1] - first)
        own = tuple(array[within] for array in arrays)
      part = Part(*layers, own)
      write = partial(self.to.segment.put, dst.replica_id, part)
      yield run, write, part.num_bytes


class _Piece(NamedTuple):
  """One part that is to be written into pages from `first_layer` on."""

  run: OpRun
  pages: tuple[int, ...]
  first_layer: int
  block: Callable[[], Any]
  local: Mapping[Any, np.ndarray]
  num_bytes: int


@dataclass(eq=False, slots=True)
class _Scatters:
  """Writes parts of blocks into pages of the pool; see `ScatterTask`."""

  book: TransferBook
  pieces: list[_Piece]
  to: Instance
  failed: Callable[[Iterable[OpRun], Exception], None]

  def run(self, desk: Desk) -> None:
    """Copies those whose ops have not ended; else has a program do it."""
    live = {id(r) for r in self.book.begin_all([p.run for p in self.pieces])}
    pieces = [piece for piece in self.pieces if id(piece.run) in live]
    blocks = [(p.pages, p.first_layer, p.local) for p in pieces]
    begun_s = time.perf_counter()
    if desk.reader.is_idle and desk.pool.copy_in_now(blocks):
      self._end(pieces, time.perf_counter() - begun_s)
      return
    for piece in pieces:
      self._dispatch(piece, desk)

  def fail(self, error: Exception) -> None:
    """Reports the error."""
    self.failed([piece.run for piece in self.pieces], error)

  def _dispatch(self, piece: _Piece, desk: Desk) -> None:
    run = piece.run
    ScatterTask(
      piece.pages,
      piece.first_layer,
      piece.block,
      None,
      lambda: run.is_live,
      partial(self._dispatched, piece, time.perf_counter()),
      lambda error: self.failed([run], error),
      _nothing,
    ).run(desk)

  def _dispatched(self, piece: _Piece, begun_s: float) -> None:
    self._end([piece], time.perf_counter() - begun_s)

  def _end(self, pieces: list[_Piece], seconds: float) -> None:
    link = self.to.device_link
    link.add_count(LinkCount(busy_s=seconds))
    done = [(piece.run, _nothing, piece.num_bytes) for piece in pieces]
    self.book.commit_all(done, link.add_count)


def _bundles(runs: Iterable[OpRun]) -> list[Bundle]:
  """Ops of the same work and ends whose layers adjoin, together."""
  found: list[Bundle] = []
  last: dict[tuple[int, int, int], Bundle] = {}
  for run in runs:
    op = run.op
    ends = (id(run.work), id(op.src), id(op.dst))
    bundle = last.get(ends)
    if bundle is None or bundle[-1].op.stop_layer != op.start_layer:
      bundle = last[ends] = []
      found.append(bundle)
    bundle.append(run)
  return found


def _turns(bundles: Iterable[Bundle]) -> Iterator[list[Bundle]]:
  """Those of a work with the same ends and layers, up to `TURN_BYTES`."""
  turn: list[Bundle] = []
  num_bytes, last = 0, None
  for bundle in bundles:
    key, size = _way(bundle), sum(run.op.num_bytes for run in bundle)
    if turn and (key != last or num_bytes + size > TURN_BYTES):
      yield turn
      turn, num_bytes = [], 0
    turn.append(bundle)
    num_bytes, last = num_bytes + size, key
  if turn:
    yield turn


def _way(bundle: Bundle) -> tuple[object, ...]:
  """What blocks that are copied in one turn have in common."""
  first, last = bundle[0].op, bundle[-1].op
  ends = _place(first.src), _place(first.dst)
  return id(bundle[0].work), ends, first.start_layer, last.stop_layer


def _place(side: DevicePages | Replica) -> tuple[type, str]:
  is_pages = isinstance(side, DevicePages)
  return type(side), side.instance if is_pages else side.segment


def _any_live(runs: Iterable[OpRun]) -> bool:
  return any(run.is_live for run in runs)


def _nothing() -> None:
  pass
