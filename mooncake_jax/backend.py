# SPDX-License-Identifier: Apache-2.0
"""The seam: the only place where time passes.

Deciders start work and later learn that it ended; they never wait elsewhere
and never see an array. `sim.VirtualBackend` ends work by cost models on a
virtual clock, `engine.DeviceBackend` on JAX devices on the wall clock.

Works that depend on each other are started together and named in `after`, so
that KVCache streams: a layer leaves as soon as it is computed, and the first
layers compute while the last ones of their prefix still arrive.

Device pages are numbered per instance. Page 0 is scratch: padding writes
there and nobody reads it, so pools hand out pages from 1.
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal
from typing import NamedTuple
from typing import overload
from typing import Protocol
from typing import runtime_checkable

import numpy as np

from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Emitted
from mooncake_jax.request import Sampling
from mooncake_jax.request import TokenLogprobs
from mooncake_jax.request import TryKey

WorkId = int
Status = Literal['completed', 'failed', 'timeout', 'cancelled']


@dataclass(eq=False, slots=True)
class PrefillChunk:
  """Prompt tokens [start, stop) of one request, all layers.

  Attributes:
    tokens: int32 [stop - start]; None where the backend computes nothing.
    pages: the request's pages on this instance, covering [0, stop) at least;
      the KVCache of [0, start) lies in them, or will when it is started
      `after` what brings it.
    sampling: given for the last chunk, whose end yields the first token.
  """

  request_id: str
  attempt: int
  start: int
  stop: int
  pages: tuple[int, ...]
  tokens: np.ndarray | None = None
  sampling: Sampling | None = None


@dataclass(slots=True)
class DecodeRow:
  """One request in a decode batch.

  Attributes:
    token: the last emitted token, whose KVCache is not yet computed; None
      where the backend computes nothing.
    position: where that token stands: prompt + emitted tokens - 1.
    pages: cover [0, position + remaining) at least.
    remaining: emit at most this many more tokens; then the work ends.
    stop_token_ids: emitting one of these ends the row.
  """

  request_id: str
  attempt: int
  token: int | None
  position: int
  pages: tuple[int, ...]
  remaining: int
  sampling: Sampling = Sampling()
  stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class DecodeBatch:
  rows: tuple[DecodeRow, ...]

  @property
  def tries(self) -> tuple[TryKey, ...]:
    """Whose rows they are."""
    return tuple([(row.request_id, row.attempt) for row in self.rows])


class DevicePages(NamedTuple):
  """Pages of an instance's KV pool, in token order."""

  instance: str
  pages: tuple[int, ...]


class Replica(NamedTuple):
  """One copy of one block in a segment; `replica_id` is never reused.

  A segment is memory of one medium that one instance registers: its pinned
  host memory bears the instance's name, its SSD 'name/ssd'. The key names
  the bytes on media that outlive the process.
  """

  segment: str
  replica_id: int
  key: BlockKey = b''


def blocks_by_segment(replicas: Sequence[Replica]) -> dict[str, int]:
  """How many lie in each segment."""
  names = [*map(attrgetter('segment'), replicas)]
  count = names.count(names[0]) if names else 0
  return {names[0]: count} if 0 < count == len(names) else Counter(names)


class TransferOp(NamedTuple):
  """Moves KVCache of layers [start_layer, stop_layer) from src to dst.

  Pages to replica offloads, replica to pages onloads, replica to replica
  copies between segments, pages to pages hands over to decode. The bytes
  arrive unchanged, in the canonical order of `docs/architecture.md`.
  """

  src: DevicePages | Replica
  dst: DevicePages | Replica
  start_layer: int
  stop_layer: int
  num_bytes: int

  @property
  def layers(self) -> tuple[int, int]:
    return self.start_layer, self.stop_layer


class BlockOps(Sequence[TransferOp]):
  """Whole blocks between pages and replicas, in one value however many.

  As a sequence: an op a block and layer range, first layers first.

  Attributes:
    pages: of an instance; block i lies in pages [i * n, (i + 1) * n) of them.
    replicas, blocks: what moves: replicas[j] is of block blocks[j].
    are_puts: pages to replicas, or else replicas to pages.
  """

  __slots__ = ('are_puts', 'blocks', 'layout', 'pages', 'replicas')

  def __init__(
    self,
    layout: KVLayout,
    pages: DevicePages,
    replicas: Sequence[Replica],
    blocks: Sequence[int],
    are_puts: bool,
  ):
    self.layout = layout
    self.pages = pages
    self.replicas = replicas
    self.blocks = blocks
    self.are_puts = are_puts

  @property
  def parts(self) -> list[tuple[tuple[int, int], int]]:
    """Layer ranges, with the bytes that a block has in each."""
    return self.layout.block_parts

  @property
  def segments(self) -> dict[str, int]:
    """Blocks to or from each segment."""
    return blocks_by_segment(self.replicas)

  def __len__(self) -> int:
    return len(self.replicas) * len(self.layout.layer_ranges)

  def __iter__(self) -> Iterator[TransferOp]:
    layout, instance = self.layout, self.pages.instance
    places = [
      DevicePages(instance, layout.block_pages(self.pages.pages, i))
      for i in self.blocks
    ]
    for layers, num_bytes in self.parts:
      for place, replica in zip(places, self.replicas):
        src, dst = (place, replica) if self.are_puts else (replica, place)
        yield TransferOp(src, dst, *layers, num_bytes)

  @overload
  def __getitem__(self, index: int) -> TransferOp: ...

  @overload
  def __getitem__(self, index: slice) -> list[TransferOp]: ...

  def __getitem__(self, index: int | slice) -> TransferOp | list[TransferOp]:
    return [*self][index]


@dataclass(slots=True)
class Completion:
  """Work ended, or (decode only, `done=False`) made progress.

  Attributes:
    started_s, time_s: when the work began to run and when it ended.
    error: what went wrong where status is not 'completed'.
    token: the first token, after a last prefill chunk on devices.
    steps: what a decode work emitted since its last completion.
    op_status: of a transfer, one status an op in the order submitted.
    spans: of a chunk, [start_s, stop_s) on each stage in order.
    logprobs: of that token, if its sampling asks for them.
    present: of a probe, how many of the leading blocks are there.
  """

  work_id: WorkId
  status: Status
  started_s: float
  time_s: float
  error: str = ''
  token: int | None = None
  steps: tuple[Emitted, ...] = ()
  op_status: tuple[Status, ...] = ()
  spans: tuple[tuple[float, float], ...] = ()
  present: int = 0
  logprobs: tuple[TokenLogprobs, ...] = ()
  done: bool = True

  @property
  def why(self) -> str:
    """How it ended, where that is not 'completed'."""
    if self.status == 'completed':
      return ''
    return f'{self.status}: {self.error}'


class LinkUse(NamedTuple):
  """What one direction of one link of an instance has carried.

  `used_s` is how long its bytes take it alone; on devices, how long it moved
  any. Over the length of a run that is its utilisation.
  """

  num_bytes: float
  used_s: float


@runtime_checkable
class Slowable(Protocol):
  """A backend whose instances can be made slow: a simulation."""

  def slow(self, instance: str, compute: float, links: float) -> None:
    """From now on work there takes so many times what it would.

    That which has begun goes on as it was; 1.0 is as it would.
    """
    ...


@runtime_checkable
class Ahead(Protocol):
  """A simulation: `progress` is what decode works made and did not tell."""

  def progress(self) -> list[Completion]: ...


class MemberChange(NamedTuple):
  """An instance was lost with all it had, or is there again, empty."""

  instance: str
  is_there: bool


@runtime_checkable
class Changing(Protocol):
  """A backend whose instances may be lost and come back: processes."""

  def member_changes(self) -> list[MemberChange]:
    """What happened to instances since the last call, in order.

    Told before the ends of works that failed with them.
    """
    ...

  def bring(self, instance: str) -> None:
    """Starts an instance that is not there; a change tells when it is."""
    ...

  def dismiss(self, instance: str) -> None:
    """Ends an instance for good, with all it has; works there fail."""
    ...


@runtime_checkable
class Sized(Protocol):
  """A backend whose instances are made for certain roles: devices."""

  def can_be(self, instance: str, role: str) -> bool:
    """Whether it has the memory and programs that the role takes."""
    ...


class Backend(Protocol):
  """Starts work, ends it, tells the time. Called from one thread only."""

  def now_s(self) -> float:
    """Seconds from the start of the run."""
    ...

  def prefill(
    self, instance: str, work: PrefillChunk, after: tuple[WorkId, ...] = ()
  ) -> WorkId:
    """Computes a chunk; chunks of a stage run in the order given.

    See `transfer` about `after`.
    """
    ...

  def decode(self, instance: str, batch: DecodeBatch, max_steps: int) -> WorkId:
    """Steps a batch until a row ends, `max_steps` or `cancel`.

    One decode work at a time per instance: the caller starts the next after
    the completion with `done=True`.
    """
    ...

  def transfer(
    self,
    ops: Sequence[TransferOp],
    priority: int,
    deadline_s: float,
    after: tuple[WorkId, ...] = (),
  ) -> WorkId:
    """Moves bytes; lower `priority` first. Past `deadline_s`: 'timeout'.

    A source is read only after the work that writes it has ended, if that
    work was started before.

    Layer by layer: a work `after` others touches layer l only once each of
    them is done with it. A chunk is when it has computed l into the pages, a
    transfer when all its ops that cover l have completed. If one of them
    ends otherwise than 'completed', this one ends as 'failed' with an error
    that names it, and always later. An id that is unknown counts as
    completed. The time until the last of them has ended does not count
    against the deadline, which is put off by it.
    """
    ...

  def drop(self, replicas: tuple[Replica, ...]) -> None:
    """Forgets the replicas' bytes; an op that reads one later fails."""
    ...

  def adopt(self, segment: str) -> list[tuple[BlockKey, int]]:
    """Blocks (key, bytes) an earlier process or driver left in a segment.

    Each may be read through the first replica of its key that names the
    segment. Called before any work; empty for media that do not outlive a
    process.
    """
    ...

  def probe(
    self,
    instance: str,
    segment: str,
    keys: tuple[BlockKey, ...],
    deadline_s: float,
  ) -> WorkId:
    """Asks a store that no instance owns which leading blocks it has.

    The instance asks that would read them, by its own way there. They may be
    anybody's, and may go at any time; the store keeps them a little for
    whoever asked. Past `deadline_s`: 'timeout'.
    """
    ...

  def link_uses(self) -> Mapping[tuple[str, str], LinkUse]:
    """By kind and instance, since the start of the run."""
    ...

  def cancel(self, work_id: WorkId) -> None:
    """Ends the work as soon as it can; its completion still comes.

    A decode work ends at the next step boundary as 'completed' with what it
    emitted. A prefill or transfer already running may still complete, a
    probe always does. An unknown or ended work is ignored.
    """
    ...

  def wait(self, until_s: float | None) -> list[Completion]:
    """Returns what ended, in order; waits for the first, at most to until_s.

    With None and no work under way it returns at once with an empty list.
    """
    ...

  def wake(self) -> None:
    """Makes a `wait` in another thread return early."""
    ...
