# SPDX-License-Identifier: Apache-2.0
"""A prefill instance: queue, fetch of the prefix, chunks, stores, handoffs.

A run leaves the queue in order, when its decode pages are reserved and its
prefill pages are free. Chunks run in the order given, several in flight where
there are stages. KVCache goes to the decode instance by page and layer range
and to the store by block: with 'layers' streaming it is sent for right behind
the chunk that computes it, and a chunk right behind the read of its prefix,
so both move layer by layer while the next layers compute.

A read that brings less than it should makes what was started behind it void:
that is stopped, and once none of it touches the run's pages the run goes on
from what did arrive.

As in FAST'25 sections 3.1 and 3.3. Differs: runs are served first come first
served; a remote prefix goes straight to device pages and is put to the local
segment from there (Algorithm 1's replication).
"""

from collections import Counter
from collections import deque
from collections import OrderedDict
from collections.abc import Callable

from mooncake_jax.backend import blocks_by_segment
from mooncake_jax.backend import Completion
from mooncake_jax.backend import PrefillChunk
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.pool import PagePool
from mooncake_jax.blocks.segments import medium
from mooncake_jax.blocks.segments import owner
from mooncake_jax.blocks.segments import REMOTE
from mooncake_jax.cluster_spec import Streaming
from mooncake_jax.events import PrefixFetched
from mooncake_jax.instance.chunking import ChunkPlan
from mooncake_jax.instance.device_cache import DeviceCache
from mooncake_jax.instance.handing import hand_over
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Stop
from mooncake_jax.instance.run import Work
from mooncake_jax.instance.storing import InstanceStore


class PrefillInstance:
  """State of one prefill instance."""

  def __init__(
    self,
    name: str,
    layout: KVLayout,
    num_pages: int,
    plan: ChunkPlan,
    streaming: Streaming,
  ):
    """Makes an idle instance that reuses nothing; give it a `store` to do so.

    Args:
      name: of the instance and of its segment.
      layout: how KVCache is cut.
      num_pages: of its device pool, scratch included.
      plan: how prompts are cut into chunks.
      streaming: see `ClusterSpec`.
    """
    self.name = name
    self.layout = layout
    self.pool = PagePool(num_pages)
    self.plan = plan
    self._stages = len(plan.stage_layers)
    self.streaming: Streaming = streaming
    self.store: InstanceStore | None = None
    self.is_gone = False  # it takes no runs and stores nothing more
    # In order; a dict, as those that leave early may stand anywhere.
    self.queue: OrderedDict[Run, None] = OrderedDict()
    # Runs with chunks to be started: their prefix is there, or on its way.
    self._ready: deque[Run] = deque()
    self._num_started = 0
    self._hopeful: deque[Run] = deque()
    self._under_way: list[Run] = []  # those that hold pages
    self._num_chunks = 0

  def enqueue(self, run: Run, now_s: float) -> Effects:
    """Queues a run, leases its prefix and looks for what lacks of it.

    One that was preempted waits before all others: it came before them.
    """
    self.queue[run] = None
    if run.num_before:
      self.queue.move_to_end(run, last=False)
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
      run = next(iter(self.queue))
      if run.is_probing or self._is_coming(run):
        break
      if not run.decode_pages and not reserve(run):
        break
      pages = self.pool.hold(
        self.layout.pages_for(run.request.num_prompt_tokens)
      )
      if pages is None:
        break
      del self.queue[run]
      run.prefill_pages = pages
      run.left_queue_s = now_s
      self._under_way.append(run)
      self._num_started += 1
      run.turn = self._num_started
      effects += self._fetch(run, now_s)
    return effects

  def on_fetch(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """The prefix arrived, or a leading part of it, or nothing."""
    run = work.run
    assert run is not None and self.store is not None
    is_whole, effects = self.store.on_fetch(work, completion, now_s)
    if run.ahead is work:
      run.ahead = None
    if not is_whole:
      effects += self._void(run)
    if run.ended:
      return effects
    if is_whole and self.streaming == 'layers':
      return effects + self._go_on(run, now_s)
    if is_whole:
      return effects + self._begin(run, now_s)
    return effects + self._again(run, now_s)

  def on_void(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """A work that followed a read which brought too little has ended."""
    run = work.run
    assert run is not None
    effects: Effects = []
    if work.step == 'chunk':
      self._num_chunks -= 1
    elif work.step == 'handoff':
      run.handoffs_open -= 1
    elif self.store is not None:
      effects += self.store.on_put(work, completion, now_s)
    if not run.ended:
      effects += self._again(run, now_s)
    return effects + self._dispatch(now_s)

  def on_chunk(
    self, work: Work, completion: Completion, now_s: float
  ) -> Effects:
    """A chunk ended: its KVCache is final."""
    self._num_chunks -= 1
    run, chunk = work.run, work.payload
    assert run is not None and isinstance(chunk, PrefillChunk)
    effects: Effects = []
    if run.ahead is work:
      run.ahead = None
    if not run.ended and completion.status == 'completed':
      run.ran(completion.started_s, completion.time_s)
      run.computed_tokens = chunk.stop
      if self.streaming == 'chunks' or (
        self.streaming == 'prompt' and run.prefilled
      ):
        effects += self._send(run, chunk.stop, (), now_s)
      if run.prefilled and self.store is not None:
        self.store.touch(run)
    elif not run.ended:
      self._forget(run)  # it is about to fail
    return effects + self._dispatch(now_s)

  def leave(self, run: Run, now_s: float) -> Effects:
    """Takes an ended run out; its pages go when no work uses them."""
    self.queue.pop(run, None)
    self._forget(run)
    return self._dispatch(now_s)

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
    self._under_way.remove(run)
    return True, effects

  def check(self) -> None:
    self.pool.check()
    if self.cache is not None:
      self.cache.check()
    assert 0 <= self._num_chunks <= self._max_chunks
    assert not set(self._ready) & set(self._hopeful)

  @property
  def cache(self) -> DeviceCache | None:
    return None if self.store is None else self.store.cache

  @property
  def is_free(self) -> bool:
    """Whether no run holds a page."""
    cached = 0 if self.cache is None else self.cache.num_pages
    return self.pool.num_free + cached == self.pool.capacity

  @property
  def _max_chunks(self) -> int:
    """Chunks handed to the backend: one a stage, and the next.

    With a second one behind it on one stage, what a chunk computed could leave
    only when that had ended too, unless it leaves layer by layer.
    """
    alone = self._stages == 1 and self.streaming != 'layers'
    return 1 if alone else self._stages + 1

  # The prefix.

  def _is_coming(self, run: Run) -> bool:
    """Whether more of its prefix is about to be stored."""
    return self.store is not None and self.store.is_coming(run, self._under_way)

  def _fetch(self, run: Run, now_s: float) -> Effects:
    """Reads the prefix, as far as it is at hand, then begins, or behind it."""
    run.state = 'fetching'
    reads: Effects = []
    if self.store is not None:
      reads = self.store.fetch(run, now_s)
    if not reads:
      return self._begin(run, now_s)
    if self.streaming != 'layers':
      return reads
    assert run.ahead is not None
    self._cut(run)
    self._hopeful.append(run)
    return [
      *reads,
      *self._send(run, run.next_start, (run.ahead,), now_s),
      *self._dispatch(now_s),
    ]

  def _begin(self, run: Run, now_s: float) -> Effects:
    """Prefill may start: what could be had of the prefix is on the device."""
    self._cut(run)
    self._line_up(run)
    effects = self._settle(run, now_s)
    if self.streaming != 'prompt':
      effects += self._send(run, run.next_start, (), now_s)
    return effects + self._dispatch(now_s)

  def _go_on(self, run: Run, now_s: float) -> Effects:
    """The prefix that chunks were started behind has arrived whole."""
    if run in self._hopeful:
      self._hopeful.remove(run)
      self._line_up(run)
    return [*self._settle(run, now_s), *self._dispatch(now_s)]

  def _line_up(self, run: Run) -> None:
    """Among the ready runs, in the order in which they left the queue.

    Else one that had to fetch would wait for all later ones that had not, and
    one of those that has begun may be the longest prompt of all.
    """
    place = len(self._ready)
    while place and self._ready[place - 1].turn > run.turn:
      place -= 1
    self._ready.insert(place, run)

  def _void(self, run: Run) -> Effects:
    """Stops all that was started behind a read that brought too little."""
    self._forget(run)
    run.ahead, run.stops = None, ()
    run.handed_pages = run.stored_blocks = 0
    for work in run.works:
      work.is_void = True
    return [Stop(work) for work in run.works]

  def _again(self, run: Run, now_s: float) -> Effects:
    """Goes on from what did arrive, once nothing void touches the pages."""
    return [] if run.works else self._fetch(run, now_s)

  def _cut(self, run: Run) -> None:
    """Plans the chunks behind the prefix, also where that is on its way."""
    run.next_start = len(run.prefix) * self.layout.block_size_tokens
    num_tokens = run.request.num_prompt_tokens
    run.stops = self.plan.stops(num_tokens, run.next_start)

  def _settle(self, run: Run, now_s: float) -> Effects:
    """It is known what of the prefix is on the device."""
    run.state = 'prefilling'
    run.computed_tokens = run.loaded_tokens(self.layout)
    size = self.layout.block_size_tokens
    tiers: Counter[str] = Counter()
    for segment, num_blocks in blocks_by_segment(run.prefix).items():
      tiers[_tier(segment, self.name)] += num_blocks
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
    found = [] if self.store is None else self.store.found(run, now_s)
    return [fetched, *found]

  # Chunks.

  def _forget(self, run: Run) -> None:
    """Starts no more chunks of a run."""
    for runs in (self._ready, self._hopeful):
      if run in runs:
        runs.remove(run)

  def _next_run(self) -> Run | None:
    """Whose chunk is next: runs in turn.

    One that waits for its prefix is next only where the first stage would have
    nothing to do, and nobody overtakes it before.
    """
    idle = self._num_chunks < self._stages
    if self._ready and self._num_chunks < self._max_chunks:
      run = self._ready[0]
      waits = self._hopeful and self._hopeful[0].turn < run.turn
      return run if idle or not waits else None
    return self._hopeful[0] if self._hopeful and idle else None

  def _dispatch(self, now_s: float) -> Effects:
    """Hands chunks to the backend, runs in the order they became ready."""
    effects: Effects = []
    while run := self._next_run():
      chunk = self._next_chunk(run)
      after = () if run.ahead is None else (run.ahead,)
      work = run.ahead = Work('chunk', self.name, chunk, run, after=after)
      if chunk.sampling is not None:
        self._forget(run)
      self._num_chunks += 1
      effects.append(Start(work))
      if self.streaming == 'layers':
        effects += self._send(run, chunk.stop, (work,), now_s)
    return effects

  def _next_chunk(self, run: Run) -> PrefillChunk:
    request, start = run.request, run.next_start
    stop, *stops = run.stops
    run.next_start, run.stops = stop, tuple(stops)
    return PrefillChunk(
      request.request_id,
      run.placement.attempt,
      start,
      stop,
      run.prefill_pages,
      None if request.prompt is None else request.prompt[start:stop],
      None if stops else request.sampling,
    )

  # What leaves.

  def _send(
    self, run: Run, num_tokens: int, after: tuple[Work, ...], now_s: float
  ) -> Effects:
    """Sends KVCache of the first tokens on that was not sent before."""
    effects = hand_over(self.name, self.layout, run, num_tokens, after)
    if self.store is not None:
      effects += self.store.store(run, num_tokens, after, now_s)
    return effects


def _tier(segment: str, instance: str) -> str:
  """Where a block was read from, as records count it."""
  if segment == REMOTE:
    return 'store'
  return medium(segment) if owner(segment) == instance else 'remote'
