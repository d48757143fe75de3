# SPDX-License-Identifier: Apache-2.0
"""Times single works on a backend: what cost models are fitted to.

Each work runs alone, twice, and the faster time counts. `Backend` is all that
is used, so a time has all that serving has: dispatch, threads, reading back.
"""

from collections.abc import Iterator

import numpy as np

from mooncake_jax.backend import Backend
from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.cluster_spec import ClusterSpec
from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import LinkSample
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.costs.model import Link
from mooncake_jax.request import Sampling

REPEATS = 2
STEPS = 6
DEADLINE_S = 120.0


def ended(backend: Backend) -> list[Completion]:
  """Everything that the works under way still say."""
  completions: list[Completion] = []
  while more := backend.wait(None):
    completions += more
  for completion in completions:
    if completion.status != 'completed':
      raise RuntimeError(f'a measured work failed: {completion.error}')
  return completions


def prefill_samples(
  backend: Backend, spec: ClusterSpec, layout: KVLayout, max_tokens: int
) -> Iterator[PrefillSample]:
  """Chunks of a quarter and of the whole chunk size on growing prefixes."""
  instance = spec.prefill_names[0]
  for chunk in (max(spec.chunk_tokens // 4, 1), spec.chunk_tokens):
    for prefix in range(0, max_tokens - chunk, max(max_tokens // 5, 1)):
      pages = tuple(range(1, 1 + layout.pages_for(prefix + chunk)))
      tokens = np.ones(chunk, np.int32)
      work = PrefillChunk(
        'measure', 0, prefix, prefix + chunk, pages, tokens, Sampling()
      )
      times_s = []
      for _ in range(REPEATS):
        backend.prefill(instance, work)
        (completion,) = ended(backend)
        times_s.append(completion.time_s - completion.started_s)
      yield PrefillSample(chunk, prefix, min(times_s))


def decode_samples(
  backend: Backend, spec: ClusterSpec, layout: KVLayout, max_tokens: int
) -> Iterator[DecodeSample]:
  """Batches of one row to the largest at growing contexts."""
  instance = spec.decode_names[0]
  for rows in sorted({1, max(spec.max_batch // 2, 1), spec.max_batch}):
    most = min(max_tokens, spec.decode_pool_tokens // rows) - STEPS
    for context in sorted({1, most // 2, most - 1}):
      batch = _batch(layout, rows, context)
      times_s = [_step_s(backend, instance, batch) for _ in range(REPEATS)]
      yield DecodeSample(rows, rows * (context + STEPS // 2), min(times_s))


def _batch(layout: KVLayout, rows: int, context: int) -> DecodeBatch:
  pages = layout.pages_for(context + STEPS)
  return DecodeBatch(
    tuple(
      DecodeRow(
        f'measure{i}',
        0,
        1,
        context,
        tuple(range(1 + i * pages, 1 + (i + 1) * pages)),
        STEPS,
      )
      for i in range(rows)
    )
  )


def _step_s(backend: Backend, instance: str, batch: DecodeBatch) -> float:
  """Mean step, the first left out: it includes the start of the batch."""
  backend.decode(instance, batch, STEPS)
  name = batch.rows[0].request_id
  segments = [
    emitted.segment
    for completion in ended(backend)
    for emitted in completion.steps
    if (name, 0) in emitted.tries
  ]
  return (segments[-1].last_s - segments[0].first_s) / (STEPS - 1)


# What a read needs was written before it.
LINKS_HERE: tuple[Link, ...] = (
  'offload',
  'onload',
  'copy',
  'handoff',
  'ssd_write',
  'ssd_read',
)


def link_samples(
  backend: Backend, spec: ClusterSpec, layout: KVLayout
) -> Iterator[tuple[Link, LinkSample]]:
  """Transfers of one block and more over each link."""
  blocks = spec.prefill_pool_tokens // spec.block_size_tokens
  for count in sorted({1, min(4, blocks), min(16, blocks)}):
    for link in LINKS_HERE:
      ops = _ops(link, spec, layout, count)
      if ops:
        times_s = [_transfer_s(backend, ops) for _ in range(REPEATS)]
        yield link, LinkSample(sum(op.num_bytes for op in ops), min(times_s))


def _ops(
  link: Link, spec: ClusterSpec, layout: KVLayout, count: int
) -> tuple[TransferOp, ...]:
  """`count` blocks in the parts that serving moves; none without a target."""
  here = spec.prefill_names[0]
  others = spec.prefill_names[1:]
  if link == 'copy' and not others:
    return ()
  if link.startswith('ssd') and not spec.ssd_bytes:
    return ()

  def ends(block: int, pages: tuple[int, ...]):
    replica, device = Replica(here, block), DevicePages(here, pages)
    on_ssd = Replica(ssd_segment(here), block, block.to_bytes(32, 'big'))
    match link:
      case 'offload':
        return device, replica
      case 'onload':
        return replica, device
      case 'copy':
        return replica, Replica(others[0], block)
      case 'handoff':
        return device, DevicePages(spec.decode_names[0], pages)
      case 'ssd_write':
        return device, on_ssd
      case 'ssd_read':
        return on_ssd, device
      case _:
        raise ValueError(f'{link=} is not measured here')

  pages = tuple(range(1, 1 + count * layout.pages_per_block))
  return tuple(
    TransferOp(
      *ends(block, layout.block_pages(pages, block)),
      start,
      stop,
      layout.block_bytes * (stop - start) // layout.num_layers,
    )
    for block in range(count)
    for start, stop in layout.layer_ranges
  )


def _transfer_s(backend: Backend, ops: tuple[TransferOp, ...]) -> float:
  written = {op.dst for op in ops if isinstance(op.dst, Replica)}
  backend.drop(tuple(written))
  start_s = backend.now_s()
  backend.transfer(ops, 0, start_s + DEADLINE_S)
  (completion,) = ended(backend)
  return completion.time_s - start_s
