# SPDX-License-Identifier: Apache-2.0
"""Ways into and out of far segments, one job of their links a part."""

from collections.abc import Callable
from functools import partial

from mooncake_jax.backend import Replica
from mooncake_jax.engine.inbox import describe
from mooncake_jax.transfer.book import TransferBook
from mooncake_jax.transfer.checksum import ChecksumError
from mooncake_jax.transfer.far import FarTier
from mooncake_jax.transfer.far import Job
from mooncake_jax.transfer.far import Layers
from mooncake_jax.transfer.op_run import OpRun
from mooncake_jax.transfer.segment import Part

Send = Callable[[OpRun, Part, slice, Callable[[], None]], None]


def read(
  run: OpRun, book: TransferBook, tier: FarTier, src: Replica, send: Send
) -> None:
  """Reads the op's parts and sends each on. Any thread may call.

  Raises:
    LookupError: some of the layers are not there.
  """
  op = run.op
  ranges = tier.segment.ranges(src, op.start_layer, op.stop_layer)
  run.num_pieces = len(ranges)
  for layers in ranges:
    num_layers = layers[1] - layers[0]
    num_bytes = op.num_bytes * num_layers // (op.stop_layer - op.start_layer)
    tier.read_link.submit(
      Job(
        num_bytes,
        partial(book.begin, run),
        partial(_read, run, tier, src, layers, num_bytes, send),
        lambda error: book.end(run, 'failed', describe(error)),
      ),
      run.work.priority,
    )


def _read(
  run: OpRun,
  tier: FarTier,
  src: Replica,
  layers: Layers,
  num_bytes: int,
  send: Send,
) -> None:
  """On the read link's thread: waits for room, reads, sends on."""
  if not tier.read_link.take(tier.read_bytes, num_bytes):
    return
  left = partial(tier.read_bytes.give, num_bytes)
  if not run.is_live:  # it ended while it waited
    left()
    return
  try:
    part = tier.segment.read(src, layers)
    send(
      run, _cut(part, run.op.start_layer, run.op.stop_layer), slice(None), left
    )
  except Exception as error:
    left()
    if isinstance(error, ChecksumError):
      tier.clean()
    raise


def _cut(part: Part, start_layer: int, stop_layer: int) -> Part:
  """The part's layers within [start_layer, stop_layer); copies nothing."""
  start = max(part.start_layer, start_layer)
  stop = min(part.stop_layer, stop_layer)
  kept = slice(start - part.start_layer, stop - part.start_layer)
  return Part(start, stop, tuple(array[kept] for array in part.slices))


def write(
  run: OpRun,
  book: TransferBook,
  tier: FarTier,
  dst: Replica,
  part: Part,
  check: Callable[[], None],
  left: Callable[[], None],
) -> None:
  """Stores a part. Any thread may call."""
  tier.write_link.submit(
    Job(
      part.num_bytes,
      partial(book.begin, run),
      partial(_stored, run, book, tier, dst, part),
      lambda error: book.end(run, 'failed', describe(error)),
      left,
      (dst, part),
      check,
    ),
    run.work.priority,
  )


def _stored(
  run: OpRun, book: TransferBook, tier: FarTier, dst: Replica, part: Part
) -> None:
  """On the write link's thread: makes readable if still wanted."""
  layers = (part.start_layer, part.stop_layer)
  keep = partial(tier.segment.keep, dst, layers)
  if not book.commit(run, keep, part.num_bytes):
    tier.segment.forget(dst, layers)
    tier.clean()
