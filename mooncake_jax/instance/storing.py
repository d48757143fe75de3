# SPDX-License-Identifier: Apache-2.0
"""The store's side of a prefill instance: what it reads, puts and offloads.

A prefix is read from wherever its blocks lie, straight into device pages. From
there they are put to the instance's host segment together with the computed
ones: blocks of other instances always (Algorithm 1's replication), blocks of
its own SSD from their `promote_hits`-th hit on.

A read that brings less than it should is tried once more from what other
replicas there are; what is still missing then is recomputed.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import device_segment
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.blocks.segments import ssd_segment
from mooncake_jax.instance.device_cache import DeviceCache
from mooncake_jax.instance.outputs import chain_keys
from mooncake_jax.instance.run import Drop
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.run import WorkStep
from mooncake_jax.instance.sharing import Sharing
from mooncake_jax.instance.telling import copying
from mooncake_jax.instance.telling import dropped
from mooncake_jax.request import BlockKey
from mooncake_jax.store.client import StoreClient

MAX_FETCHES = 2


class InstanceStore:
  """One prefill instance's dealings with the store."""

  def __init__(
    self,
    name: str,
    client: StoreClient,
    promote_hits: int,
    cache: DeviceCache | None = None,
    sharing: Sharing | None = None,
  ):
    """Reads and puts for instance `name`.

    Args:
      cache: of blocks that stay on the device, if it keeps any.
      sharing: with other processes' clusters, if there is a store for that.
      promote_hits: a block on the instance's SSD is put back to its host
        segment at this hit and after; 1 at once. Of one that was put straight
        to the SSD the put counts as a hit.
    """
    self.name = name
    self.client = client
    self.promote_hits = promote_hits
    self.cache = cache
    self.sharing = sharing
    self.is_closed = False  # the instance is gone: it stores nothing more

  def expect(self, run: Run, now_s: float) -> Effects:
    """Keeps the run's prefix while it queues, and asks for what it lacks."""
    keys = self._keys(run)
    self.client.lease(keys, now_s)
    return [] if self.sharing is None else self.sharing.probe(run, keys)

  def on_probe(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """The shared store answered, or did not in time."""
    run = work.run
    assert run is not None and self.sharing is not None
    run.is_probing = False
    keys = self._keys(run)
    effects = self.sharing.on_probe(work, keys, completion, now_s)
    self.client.lease(keys, now_s)
    return effects

  def is_coming(self, run: Run, others: Iterable[Run]) -> bool:
    """Whether one of the others brings what the run's plan still lacks here.

    What is read is what is there when a run leaves the queue, which may be long
    before its turn; what the others are to compute would be computed again.
    """
    others = [other for other in others if not other.ended]
    plan = run.request.block_keys[: run.placement.local_blocks]
    if not others or not plan:
      return False
    at_hand = self.client.num_at(self.name, plan)
    lacks = plan[at_hand : at_hand + 1]
    return bool(lacks) and any(
      other.request.block_keys[at_hand : at_hand + 1] == lacks
      for other in others
    )

  def fetch(self, run: Run, now_s: float) -> Effects:
    """Starts reading what the run's pages lack; nothing if that is nothing."""
    if run.num_fetches == MAX_FETCHES:
      return []
    plan = run.placement
    held = self.client.hold_prefix(
      self._keys(run),
      self.name,
      plan.fetch_blocks,
      plan.fetch_from,
      now_s,
      share=not run.loaded_blocks,
    )
    if not run.loaded_blocks:
      self._share(run, held)
    missing = held[run.loaded_blocks :]
    run.prefix = run.prefix[: run.loaded_blocks] + missing
    if not missing:
      return []
    run.num_fetches += 1
    first_page = run.loaded_blocks * self.client.layout.pages_per_block
    ops = self.client.get_ops(
      missing, self.name, run.prefill_pages[first_page:]
    )
    run.ahead = Work('fetch', self.name, ops, run, missing)
    return [Start(run.ahead)]

  def on_fetch(
    self, work: Work, completion: Completion, now_s: float
  ) -> tuple[bool, Effects]:
    """Counts the leading blocks that arrived.

    Returns:
      Whether all did; and what is to be done about bad replicas.
    """
    assert work.run is not None
    arrived, bad = self.client.arrived(work.held, completion)
    work.run.loaded_blocks += arrived
    work.run.prefix = work.run.prefix[: work.run.loaded_blocks]
    return arrived == len(work.held), dropped(self.client.master, bad, now_s)

  def store(
    self, run: Run, num_tokens: int, after: tuple[Work, ...], now_s: float
  ) -> Effects:
    """Puts the complete new blocks of the first tokens, as `after` brings."""
    keys = run.request.block_keys
    last = min(num_tokens // self.client.layout.block_size_tokens, len(keys))
    effects: Effects = []
    pages = DevicePages(self.name, run.prefill_pages)
    for span in self._wanted(run, run.stored_blocks, last):
      effects += self._put(run, keys, pages, span, after, now_s)
    run.stored_blocks = max(run.stored_blocks, last)
    return effects

  def store_output(self, run: Run, now_s: float) -> Effects:
    """Puts what of a decoded run's complete blocks the instance lacks.

    From the decode pages; its prompt's too, where they have gone since, for
    nothing after a hole is ever matched.
    """
    if self.is_closed:
      return []
    # The last token's KVCache was never computed.
    chain = chain_keys(
      run.request,
      run.output,
      run.context_tokens - 1,
      self.client.layout.block_size_tokens,
    )
    first = self.client.num_at(self.name, chain)
    pages = DevicePages(run.placement.decode, run.decode_pages)
    return self._put(
      run, chain, pages, (first, len(chain)), (), now_s, 'put_output'
    )

  def found(self, run: Run, now_s: float) -> Effects:
    """What was read of the prefix is worth sharing."""
    if self.sharing is None:
      return []
    return self.sharing.offer(
      run.request.block_keys[: run.loaded_blocks], now_s
    )

  def touch(self, run: Run) -> None:
    """The whole prompt was used."""
    self.client.master.touch(run.request.block_keys, self.name)

  def on_put(self, work: Work, completion: Completion, now_s: float) -> Effects:
    """Blocks were written: publish them, or give them up."""
    if work.is_void:
      completion = replace(completion, status='cancelled', op_status=())
    published, revoked = self.client.put_done(work.held, completion)
    effects: Effects = [
      *self.client.master.events.stored(published, now_s),
      *([Drop(tuple(revoked))] if revoked else []),
      *self._offload(now_s),
    ]
    if self.sharing is not None:
      effects += self.sharing.offer([r.key for r in published], now_s)
    return effects

  def on_copies(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """Copies were written: publish them, or give them up."""
    published, revoked = self.client.copies_done(work.tasks, completion, now_s)
    effects: Effects = [
      *self.client.master.events.stored(published, now_s),
      *([Drop(tuple(revoked))] if revoked else []),
    ]
    if self.sharing is not None and work.tasks[0].dst.segment == REMOTE:
      effects += self.sharing.on_copies(bool(published), now_s)
    return effects

  def _share(self, run: Run, held: tuple[Replica, ...]) -> None:
    """Takes the pages of leading blocks that the device has already."""
    own = device_segment(self.name)
    shared = tuple(takewhile(lambda r: r.segment == own, held))
    if self.cache is None or not shared:
      return
    num_pages = len(shared) * self.client.layout.pages_per_block
    self.cache.pool.release(run.prefill_pages[:num_pages])
    run.prefill_pages = self.cache.share(shared) + run.prefill_pages[num_pages:]
    run.shared, run.loaded_blocks = shared, len(shared)
    run.prefix = shared

  def give_back(
    self, run: Run, now_s: float
  ) -> tuple[tuple[int, ...], Effects]:
    """Ends the run's hold on shared blocks; the cache keeps what it can.

    Returns:
      The run's own pages that go back to the pool, and what to tell.
    """
    pages, layout = run.prefill_pages, self.client.layout
    own = pages[len(run.shared) * layout.pages_per_block :]
    if self.cache is None:
      return own, []
    effects: Effects = []
    if run.prefilled and not self.is_closed:
      keys = run.request.block_keys
      num_blocks = self.cache.num_kept(run.shared, len(keys))
      kept, effects = self.cache.keep(keys, num_blocks, pages, now_s)
      own = tuple(page for page in own if page not in kept)
    self.cache.unshare(run.shared)
    run.shared = ()
    return own, effects

  def _keys(self, run: Run) -> tuple[BlockKey, ...]:
    """Keys of the prompt's blocks that may be reused."""
    num_tokens = run.request.num_prompt_tokens
    return run.request.block_keys[
      : self.client.layout.reusable_blocks(num_tokens)
    ]

  def _wanted(self, run: Run, first: int, last: int) -> list[tuple[int, int]]:
    """Runs of blocks in [first, last) to be put: not those of a cold SSD."""
    spans: list[tuple[int, int]] = []
    start = first  # of the blocks since the last that stays
    for i in range(first, min(last, len(run.prefix))):
      if self._stays(run.prefix[i]):
        spans.append((start, i))
        start = i + 1
    spans.append((start, last))
    return [(start, stop) for start, stop in spans if start < stop]

  def _stays(self, replica: Replica) -> bool:
    """Whether a block that was read is not to be put to the host segment."""
    if owner(replica.segment) != self.name:
      return False
    if medium(replica.segment) != 'ssd':
      return True
    return self.client.master.uses(replica) < self.promote_hits

  def _put(
    self,
    run: Run,
    chain: tuple[BlockKey, ...],
    pages: DevicePages,
    blocks: tuple[int, int],
    after: tuple[Work, ...],
    now_s: float,
    step: WorkStep = 'put',
  ) -> Effects:
    """Puts to host memory; what comes too fast for it, to the SSD at once."""
    effects: Effects = []
    first, last = blocks
    for segment in (self.name, ssd_segment(self.name)):
      put = self.client.put(chain, first, last, segment, pages, now_s)
      effects += dropped(self.client.master, put.evicted, now_s)
      if put.ops:
        work = Work(step, self.name, put.ops, run, put.replicas, after=after)
        effects.append(Start(work))
      if not put.comes_too_fast:
        break
      first = put.stop
    return effects

  def _offload(self, now_s: float) -> Effects:
    """Copies to the SSD what the next puts will push out."""
    if self.is_closed:
      return []
    copies = self.client.offload(self.name, now_s)
    return copying(self.client.master, copies, now_s)
