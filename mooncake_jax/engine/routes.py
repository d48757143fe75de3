# SPDX-License-Identifier: Apache-2.0
"""The ways of a transfer op: out of its source, over a link, into its end.

    pages    owner copies out -> reader waits -> link
    host     segment gives its parts -> link
    far      read link reads its parts -> link
    arrivals another process sends its parts -> link
             link -> host: segment keeps the part
             link -> device: owner copies in -> reader waits
             write link -> far: segment stores the part

An op goes in pieces, each on its own: runs of pages, or parts of a replica.
Whoever holds a piece asks the book before it writes anything.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
import itertools
from typing import Any

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import ARRIVALS
from mooncake_jax.engine import far_routes
from mooncake_jax.engine.cpu_moves import CpuMoves
from mooncake_jax.engine.inbox import describe
from mooncake_jax.engine.instance import Instance
from mooncake_jax.engine.progress import Layers
from mooncake_jax.engine.stage import Stage
from mooncake_jax.engine.tasks import GatherTask
from mooncake_jax.engine.tasks import ScatterTask
from mooncake_jax.transfer.arrivals import Arrivals
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.links import Move
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.page_copies import split_pages
from mooncake_jax.transfer.segment import Part
from mooncake_jax.transfer.segment import verify
from mooncake_jax.transfer.segment import with_checksum


def no_one() -> None:
  """Nobody waits for the source's memory."""


def _layers(part: Part) -> Layers:
  return part.start_layer, part.stop_layer


def _last_of(count: int, call: Callable[[], None]) -> Callable[[], None]:
  """What makes the call when it is called for the `count`-th time."""
  if count == 1:
    return call
  calls = itertools.count(1)
  return lambda: call() if next(calls) == count else None


class Routes:
  """Carries ops between the memories of instances. Any thread may call."""

  def __init__(
    self,
    instances: Mapping[str, Instance],
    tiers: Mapping[str, FarTier],
    copy_sizes: tuple[int, ...],
    token_layer_bytes: int,
    arrivals: Arrivals | None = None,
  ):
    """Makes routes; they need `use` before the first `start`.

    Args:
      tiers: far segments, by name.
      copy_sizes: numbers of pages that are copied at once; has 1.
      token_layer_bytes: KVCache of one token in one layer.
      arrivals: what other processes send.
    """
    self._arrivals = arrivals
    self.book: TransferBook
    self._cpu_moves: CpuMoves
    self._instances = instances
    self._tiers = tiers
    self._copy_sizes = copy_sizes
    self._token_layer_bytes = token_layer_bytes

  def use(self, book: TransferBook) -> None:
    """Tells what becomes of ops to this book."""
    self.book = book
    self._cpu_moves = CpuMoves(book, self._instances, self._token_layer_bytes)

  def start(self, runs: Sequence[OpRun]) -> None:
    """Sends ops on their way; those that can't go end as 'failed'."""
    for run in self._cpu_moves.start(runs):
      self._start(run)

  def _start(self, run: OpRun) -> None:
    try:
      if isinstance(run.op.src, Replica):
        self._start_from_replica(run, run.op.src)
      else:
        self._start_from_pages(run, run.op.src)
    except Exception as error:
      self._fail(run, error)

  def _start_from_pages(self, run: OpRun, src: DevicePages) -> None:
    op, instance = run.op, self._at(src.instance)
    pieces = [slice(0, len(src.pages))]
    if isinstance(op.dst, DevicePages):
      if len(op.dst.pages) != len(src.pages):
        raise ValueError(f'{len(src.pages)} pages to {len(op.dst.pages)}')
      pieces = split_pages(len(src.pages), self._copy_sizes)
    sources = instance.stages_of((op.start_layer, op.stop_layer))
    run.num_pieces = len(pieces) * sum(
      len(self._ways(run, layers)) for _, layers in sources
    )
    for stage, layers in sources:
      for piece in pieces:
        self._gather(run, instance, stage, layers, piece)

  def _gather(
    self,
    run: OpRun,
    instance: Instance,
    stage: Stage,
    layers: Layers,
    piece: slice,
  ) -> None:
    """Has a stage copy its layers of some of the pages out."""
    assert isinstance(run.op.src, DevicePages)
    pages = run.op.src.pages[piece]
    num_bytes = self._num_bytes(instance, len(pages), layers[1] - layers[0])
    left = partial(instance.staging.give, num_bytes)
    stage.post(
      GatherTask(
        pages,
        *layers,
        num_bytes,
        run.work.priority,
        lambda: run.is_live,
        partial(self.book.begin, run),
        lambda _, slices: self._send_all(
          run, Part(*layers, slices), piece, left
        ),
        partial(self._fail, run),
        is_released=bool(run.work.after),
      )
    )

  def _start_from_replica(self, run: OpRun, src: Replica) -> None:
    if src.segment == ARRIVALS:
      self._expect(run, src)
      return
    if tier := self._tiers.get(src.segment):
      far_routes.read(run, self.book, tier, src, self._send_more)
      return
    op, segment = run.op, self._at(src.segment).segment
    parts = segment.read(src.replica_id, op.start_layer, op.stop_layer)
    run.num_pieces = sum(len(self._ways(run, _layers(part))) for part in parts)
    for part in parts:
      self._send_all(run, part, slice(None), no_one)

  def _expect(self, run: OpRun, src: Replica) -> None:
    """Sends on what comes; each of its layers counts as a piece till then."""
    assert self._arrivals is not None, run.op
    run.num_pieces = run.op.stop_layer - run.op.start_layer
    self._arrivals.expect(
      src.replica_id, partial(self._arrived, run), partial(self._fail, run)
    )

  def _arrived(self, run: OpRun, part: Part, left: Callable[[], None]) -> None:
    ways = self._ways(run, _layers(part))
    first = max(run.op.start_layer, part.start_layer)
    last = min(run.op.stop_layer, part.stop_layer)
    self.book.add_pieces(run, len(ways) - (last - first))
    self._send_all(run, part, slice(None), left)

  def _ways(self, run: OpRun, layers: Layers) -> list[Stage | None]:
    """Where the op's share of a part goes: to stages, else to one segment."""
    op = run.op
    if isinstance(op.dst, Replica):
      return [None]
    wanted = max(op.start_layer, layers[0]), min(op.stop_layer, layers[1])
    return [stage for stage, _ in self._at(op.dst.instance).stages_of(wanted)]

  def _send_more(
    self, run: OpRun, part: Part, piece: slice, left: Callable[[], None]
  ) -> None:
    """`_send_all` of a part that was counted as one piece."""
    self.book.add_pieces(run, len(self._ways(run, _layers(part))) - 1)
    self._send_all(run, part, piece, left)

  def _send_all(
    self, run: OpRun, part: Part, piece: slice, left: Callable[[], None]
  ) -> None:
    """Sends a part to each stage of the destination that has its layers."""
    ways = self._ways(run, _layers(part))
    last_left = _last_of(len(ways), left)
    for stage in ways:
      self._send(run, part, piece, stage, last_left)

  def _send(
    self,
    run: OpRun,
    part: Part,
    piece: slice,
    stage: Stage | None,
    left: Callable[[], None],
  ) -> None:
    """Puts a part on the link to the op's destination."""
    op = run.op
    check = partial(self._verify, run, part)
    if isinstance(op.dst, Replica) and (
      tier := self._tiers.get(op.dst.segment)
    ):
      far_routes.write(run, self.book, tier, op.dst, part, check, left)
      return
    may_run_now = False
    if isinstance(op.dst, Replica):
      instance = self._at(op.dst.segment)
      may_run_now = instance.spec.checksums != 'all'  # computing one is work
      ((at, _), *_) = instance.stages_of(_layers(part))
      link, place = instance.host_link, at.host_place
      arrived = partial(self._keep, run, instance, op.dst, part)
    else:
      assert stage is not None
      instance = self._at(op.dst.instance)
      link, place = instance.device_link, stage.device_place
      pages = op.dst.pages[piece]
      arrived = partial(self._write, run, instance, stage, pages, part)
    routes = tuple(place.targets(len(part.slices)))
    link.submit(
      Move(
        tuple(part.slices[i] for i, _ in routes),
        tuple(target for _, target in routes),
        partial(self.book.begin, run),
        arrived,
        partial(self._fail, run),
        left,
        check,
        is_private=not self._is_kept(op.src) or not self._is_kept(op.dst),
      ),
      run.work.priority,
      may_run_now,
    )

  def _verify(self, run: OpRun, part: Part) -> None:
    """On a link's thread: a bad part of a replica is gone from then on."""
    src = run.op.src
    try:
      verify(part, str(src))
    except ChecksumError:
      if isinstance(src, Replica):
        self._at(src.segment).segment.drop([src.replica_id])
      raise

  def _keep(
    self,
    run: OpRun,
    instance: Instance,
    dst: Replica,
    part: Part,
    moved: list[Any],
  ) -> None:
    """On the host link's thread: the segment keeps what arrived."""
    kept = part._replace(slices=tuple(moved))
    if instance.spec.checksums == 'all':
      kept = with_checksum(kept)
    segment = instance.segment
    write = partial(segment.put, dst.replica_id, kept)
    self.book.commit(run, write, kept.num_bytes)

  def _write(
    self,
    run: OpRun,
    instance: Instance,
    stage: Stage,
    pages: tuple[int, ...],
    part: Part,
    moved: list[Any],
  ) -> None:
    """On the device link's thread: hands the block to the pool's owner."""
    first = max(run.op.start_layer, part.start_layer, stage.layers[0])
    last = min(run.op.stop_layer, part.stop_layer, stage.layers[1])
    layers = (first - part.start_layer, last - part.start_layer)
    num_tokens = len(pages) * instance.page_tokens
    if moved[0].shape[2] != num_tokens:
      raise ValueError(f'{moved[0].shape[2]} tokens to {len(pages)} pages')
    block, local = stage.device_place.arrived(
      moved, len(part.slices), instance.num_kv_heads, layers
    )
    num_bytes = self._num_bytes(instance, len(pages), last - first)
    stage.post(
      ScatterTask(
        pages,
        first,
        block,
        local,
        lambda: run.is_live,
        partial(self.book.piece_arrived, run, num_bytes),
        partial(self._fail, run),
        partial(instance.arrived.give, sum(array.nbytes for array in moved)),
      )
    )

  def _is_kept(self, side: DevicePages | Replica) -> bool:
    """Whether its arrays stay in a host segment."""
    return isinstance(side, Replica) and side.segment in self._instances

  def _at(self, name: str) -> Instance:
    if name not in self._instances:
      raise LookupError(f'there is no instance {name!r}')
    return self._instances[name]

  def _num_bytes(
    self, instance: Instance, num_pages: int, num_layers: int
  ) -> int:
    num_tokens = num_pages * instance.page_tokens
    return num_tokens * num_layers * self._token_layer_bytes

  def _fail(self, run: OpRun, error: Exception) -> None:
    self.book.end(run, 'failed', describe(error))
