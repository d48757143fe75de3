# SPDX-License-Identifier: Apache-2.0
"""A prefill instance: queue, fetch of the prefix, chunks, stores, handoffs.

A run leaves the queue in order, when its decode pages are reserved and its
prefill pages are free. Chunks of an instance run one after another. As one
ends, its KVCache is final and goes to the decode instance by page and layer
range and to the store by block, ahead of the next chunk in the device's
queue and moving while that computes.

As in FAST'25 sections 3.1 and 3.3. Differs: runs are served first come first
served; a remote prefix goes straight to device pages and is put to the local
segment from there (Algorithm 1's replication).
"""

from collections import Counter
from collections import deque
from collections.abc import Callable

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.backend import Replica
from mooncake_jax.backend import TransferOp
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.pool import PagePool
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.events import PrefixFetched
from mooncake_jax.instance.device_cache import DeviceCache
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.storing import InstanceStore

# Chunks handed to the backend. With a second one behind it, what a chunk
# computed could leave the device only when that had ended too.
MAX_CHUNKS = 1


class PrefillInstance:
  """State of one prefill instance."""

  def __init__(
    self,
    name: str,
    layout: KVLayout,
    num_pages: int,
    chunk_tokens: int,
  ):
    """Makes an idle instance that reuses nothing; give it a `store` to do so.

    Args:
      name: of the instance and of its segment.
      layout: how KVCache is cut.
      num_pages: of its device pool, scratch included.
      chunk_tokens: prefill_chunk of the paper.
    """
    self.name = name
    self.layout = layout
    self.pool = PagePool(num_pages)
    self.chunk_tokens = chunk_tokens
    self.store: InstanceStore | None = None
    self.queue: deque[Run] = deque()
    self._ready: deque[Run] = deque()
    self._num_chunks = 0

  def enqueue(self, run: Run, now_s: float) -> Effects:
    """Queues a run, leases its prefix and looks for what lacks of it."""
    self.queue.append(run)
    return [] if self.store is None else self.store.expect(run, now_s)

  def on_probe(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """What else there is of a queued run's prefix is known, or never will."""
    assert self.store is not None
    return self.store.on_probe(work, completion, now_s)

  def start_next(self, reserve: Callable[[Run], bool], now_s: float) -> Effects:
    """Starts queued runs while decode and prefill pages can be had."""
    effects: Effects = []
    while self.queue:
      run = self.queue[0]
      if run.is_probing:
        break
      if not run.decode_pages and not reserve(run):
        break
      pages = self.pool.hold(
        self.layout.pages_for(run.request.num_prompt_tokens)
      )
      if pages is None:
        break
      self.queue.popleft()
      run.prefill_pages = pages
      run.left_queue_s = now_s
      effects += self._fetch(run, now_s)
    return effects

  def on_fetch(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """The prefix arrived, or a leading part of it, or nothing."""
    run = work.run
    assert run is not None and self.store is not None
    is_whole, effects = self.store.on_fetch(work, completion, now_s)
    if run.ended:
      return effects
    return effects + self._fetch(run, now_s, again=not is_whole)

  def on_chunk(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """A chunk ended: its KVCache is final and goes out."""
    self._num_chunks -= 1
    run, chunk = work.run, work.payload
    assert run is not None and isinstance(chunk, PrefillChunk)
    effects: Effects = []
    if not run.ended and completion.status == 'completed':
      if run.prefill_start_s is None:
        run.prefill_start_s = completion.started_s
      run.prefill_s += completion.time_s - completion.started_s
      run.computed_tokens = chunk.stop
      effects += self._hand_over(run) + self._store(run, now_s)
    elif run in self._ready:
      self._ready.remove(run)  # it is about to fail
    return effects + self._dispatch()

  def leave(self, run: Run) -> Effects:
    """Takes an ended run out; its pages go when no work uses them."""
    if run in self.queue:
      self.queue.remove(run)
    if run in self._ready:
      self._ready.remove(run)
    return self._dispatch()

  def release(self, run: Run, now_s: float) -> tuple[bool, Effects]:
    """Frees the run's prefill pages once it is done with them.

    Returns:
      Whether pages came free, and what the device cache did with them.
    """
    done = run.ended or (run.prefilled and not run.handoffs_open)
    if not run.prefill_pages or run.prefill_uses or not done:
      return False, []
    pages, effects = run.prefill_pages, []
    if self.store is not None:
      pages, effects = self.store.give_back(run, now_s)
    self.pool.release(pages)
    run.prefill_pages = ()
    return True, effects

  def check(self) -> None:
    self.pool.check()
    if self.cache is not None:
      self.cache.check()
    assert 0 <= self._num_chunks <= MAX_CHUNKS

  @property
  def cache(self) -> DeviceCache | None:
    return None if self.store is None else self.store.cache

  @property
  def is_free(self) -> bool:
    """Whether no run holds a page."""
    cached = 0 if self.cache is None else self.cache.num_pages
    return self.pool.num_free + cached == self.pool.capacity

  def _fetch(self, run: Run, now_s: float, again: bool = True) -> Effects:
    """Reads the prefix, as far as it is at hand, then begins."""
    run.state = 'fetching'
    reads: Effects = []
    if self.store is not None and again:
      reads = self.store.fetch(run, now_s)
    return reads or self._begin(run, now_s)

  def _begin(self, run: Run, now_s: float) -> Effects:
    """Prefill may start: what could be had of the prefix is on the device."""
    size = self.layout.block_size_tokens
    run.next_start = run.computed_tokens = run.loaded_tokens(self.layout)
    run.state = 'prefilling'
    self._ready.append(run)
    tiers = Counter(_tier(r, self.name) for r in run.prefix)
    fetched = PrefixFetched(
      now_s,
      *run.key,
      self.name,
      run.left_queue_s,
      local_tokens=tiers['host'] * size,
      ssd_tokens=tiers['ssd'] * size,
      device_tokens=tiers['device'] * size,
      remote_tokens=tiers['remote'] * size,
      store_tokens=tiers['store'] * size,
    )
    return [
      fetched,
      *self._hand_over(run),
      *self._store(run, now_s),
      *self._dispatch(),
    ]

  def _dispatch(self) -> Effects:
    """Hands chunks to the backend, runs in the order they became ready."""
    effects: Effects = []
    while self._ready and self._num_chunks < MAX_CHUNKS:
      run = self._ready[0]
      chunk = self._next_chunk(run)
      if chunk.sampling is not None:
        self._ready.popleft()
      self._num_chunks += 1
      effects.append(Start(Work('chunk', self.name, chunk, run)))
    return effects

  def _next_chunk(self, run: Run) -> PrefillChunk:
    request, start = run.request, run.next_start
    stop = min(start + self.chunk_tokens, request.num_prompt_tokens)
    last = stop == request.num_prompt_tokens
    run.next_start = stop
    return PrefillChunk(
      request.request_id,
      run.placement.attempt,
      start,
      stop,
      run.prefill_pages,
      None if request.prompt is None else request.prompt[start:stop],
      request.sampling if last else None,
    )

  def _store(self, run: Run, now_s: float) -> Effects:
    return [] if self.store is None else self.store.store(run, now_s)

  def _hand_over(self, run: Run) -> Effects:
    """Sends the pages whose KVCache is final to the decode instance."""
    first = run.handed_pages
    last = (
      self.layout.pages_for(run.computed_tokens)
      if run.prefilled
      else run.computed_tokens // self.layout.page_tokens
    )
    if last == first:
      return []
    run.handed_pages = last
    run.handoffs_open += 1
    src = DevicePages(self.name, run.prefill_pages[first:last])
    dst = DevicePages(run.placement.decode, run.decode_pages[first:last])
    ops = tuple(
      TransferOp(
        src, dst, *layers, self.layout.part_bytes(last - first, layers)
      )
      for layers in self.layout.layer_ranges
    )
    return [Start(Work('handoff', self.name, ops, run))]


def _tier(replica: Replica, instance: str) -> str:
  """Where a block was read from, as records count it."""
  if replica.segment == REMOTE:
    return 'store'
  own = owner(replica.segment) == instance
  return medium(replica.segment) if own else 'remote'
