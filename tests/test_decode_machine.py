# SPDX-License-Identifier: Apache-2.0
"""A decode instance against a naive pool: counts of pages and nothing else.

The machine is the cluster's side of it: it asks for pages, hands over, joins,
steps the batch as a backend would, ends and preempts.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from hypothesis.stateful import invariant
from hypothesis.stateful import precondition
from hypothesis.stateful import rule
from hypothesis.stateful import RuleBasedStateMachine

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.cluster_spec import Reserve
from mooncake_jax.events import Finished
from mooncake_jax.instance.decode import DecodeInstance
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import Start
from mooncake_jax.request import Emitted
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.request import TokenSegment

PAGE_TOKENS = 2
LAYOUT = KVLayout(1, 4, PAGE_TOKENS, PAGE_TOKENS, 1)
MAX_STEPS = 4


def pages_for(num_tokens: int) -> int:
  return -(-num_tokens // PAGE_TOKENS)


class DecodeMachine(RuleBasedStateMachine):
  """Runs in whatever state, and the pages a naive pool thinks they hold."""

  reserve: Reserve = 'prompt'

  @initialize(capacity=st.integers(8, 12), max_batch=st.integers(1, 3))
  def begin(self, capacity, max_batch):
    self.capacity, self.max_batch = capacity, max_batch
    self.instance = DecodeInstance(
      'd', LAYOUT, capacity + 1, max_batch, MAX_STEPS, None, self.reserve
    )

  def __init__(self):
    super().__init__()
    self.count = 0
    self.waiting: list[Run] = []  # were refused pages, the oldest first
    self.coming: list[Run] = []  # hold pages; their KVCache is under way
    self.here: list[Run] = []  # joined
    self.leaving: list[Run] = []  # preempted or cancelled, still read
    self.owed: list[Run] = []  # preempted and not back yet
    self.read: dict[Run, tuple[int, ...]] = {}
    self.batch: DecodeBatch | None = None

  # What the cluster does.

  @rule(prompt=st.integers(1, 8), output=st.integers(1, 8))
  def insert(self, prompt, output):
    request = Request(f'{self.count:04}', float(self.count), prompt, output)
    self.count += 1
    self.waiting.append(
      Run(request, Placement(request.request_id, 0, 'p', 'd'))
    )
    self._ask(self.waiting[-1])

  @precondition(lambda self: self.waiting)
  @rule(data=st.data())
  def ask_again(self, data):
    self._ask(data.draw(st.sampled_from(self.waiting)))

  @precondition(lambda self: self.waiting)
  @rule(data=st.data())
  def cancel_waiting(self, data):
    """It frees nothing, but others may come in its place."""
    run = self._take(data, self.waiting)
    run.state = 'ended'
    self._apply(self.instance.leave(run))
    assert self.instance.release(run)

  def _ask(self, run):
    """The first of those who wait gets its pages, if there are enough."""
    prompt = run.request.num_prompt_tokens
    output = run.request.max_output_tokens
    need, spare = pages_for(prompt + output - 1), 0
    if self.reserve == 'prompt':
      need = min(need, pages_for(prompt + 1))
      spare = len(self.holders)
    fits = need + spare <= self.instance.pool.num_free
    fits = fits and run is self.waiting[0] and not self.owed
    assert self.instance.reserve(run) == fits
    assert len(run.decode_pages) == need * fits
    if fits:
      self.waiting.remove(run)
      self.coming.append(run)

  @precondition(lambda self: self.coming)
  @rule(data=st.data())
  def join(self, data):
    """Its KVCache is here, with the first token."""
    run = self._take(data, self.coming)
    run.num_emitted = 1
    if run.request.max_output_tokens == 1:
      self._end(run)
      return
    self.here.append(run)
    self._apply(self.instance.join(run))
    self._go_on()

  @precondition(lambda self: self.batch)
  @rule(data=st.data())
  def step(self, data):
    """Some steps are made; the work ends with a row or at will."""
    batch = self.batch
    assert batch is not None
    most = min(MAX_STEPS, *(row.remaining for row in batch.rows))
    self._steps(data.draw(st.integers(1, most)))

  @precondition(lambda self: self.here)
  @rule(data=st.data())
  def cancel(self, data):
    self._end(self._take(data, self.here))

  @precondition(lambda self: self.coming)
  @rule(data=st.data())
  def cancel_early(self, data):
    self._end(self._take(data, self.coming))

  @precondition(lambda self: self.leaving)
  @rule(data=st.data())
  def finish(self, data):
    """What read the pages of one that left has ended."""
    self._read(self._take(data, self.leaving))

  @precondition(lambda self: self.owed)
  @rule(data=st.data())
  def resume(self, data):
    """One that was preempted comes before all that are new."""
    leg = data.draw(st.sampled_from(self.owed))
    if any(run.key == leg.key for run in self.leaving):
      return  # its pages are still read
    need = pages_for(min(leg.num_tokens, leg.request.num_prompt_tokens + 1))
    fits = need + len(self.holders) <= self.instance.pool.num_free
    assert self.instance.reserve(leg) == fits
    if fits:
      self.owed.remove(leg)
      self.coming.append(leg)

  @precondition(lambda self: self.owed)
  @rule(data=st.data())
  def cancel_preempted(self, data):
    """It frees nothing, but others may come in its place."""
    leg = data.draw(st.sampled_from(self.owed))
    if any(run.key == leg.key for run in self.leaving):
      return
    self.owed.remove(leg)
    leg.state = 'ended'
    self._apply(self.instance.leave(leg))
    assert self.instance.release(leg)

  # What must hold.

  @invariant()
  def check(self):
    self.instance.check()
    held = sum(len(run.decode_pages) for run in self.holders)
    assert held + self.instance.pool.num_free == self.capacity
    for run in self.here:
      assert len(run.decode_pages) >= pages_for(run.context_tokens - 1)
      assert len(run.decode_pages) <= pages_for(run.num_tokens)
    for run, pages in self.read.items():
      assert run.decode_pages == pages, 'pages went while they were read'
    if self.batch is not None:
      assert 0 < len(self.batch.rows) <= self.max_batch
      rows = [page for row in self.batch.rows for page in row.pages]
      assert len({*rows}) == len(rows)
      for run, row in zip(self.instance.runs, self.batch.rows):
        assert run.decode_pages[: len(row.pages)] == row.pages
        assert len(row.pages) >= pages_for(row.position + row.remaining)

  @invariant()
  def somebody_goes_on(self):
    """Nobody waits in a circle."""
    if self.here and not self.coming and not self.leaving:
      assert self.batch is not None

  def teardown(self):
    """Whatever happened, all that is here can be brought to its end."""
    for run in self.coming:
      run.state = 'ended'
      self.instance.leave(run)
      self._release(run)
    self.coming = []
    self._go_on()
    while self.here or self.leaving or self.batch:
      while self.leaving:
        self._read(self.leaving.pop())
      if self.here or self.batch:
        assert self.batch is not None
        self._steps(min(MAX_STEPS, *(r.remaining for r in self.batch.rows)))
    assert self.instance.is_free

  @property
  def holders(self):
    pinned = [run for run in self.instance._in_work if not self._is_known(run)]
    return [*self.coming, *self.here, *self.leaving, *pinned]

  def _is_known(self, run):
    return run in (*self.coming, *self.here, *self.leaving)

  def _take(self, data, runs):
    return runs.pop(data.draw(st.integers(0, len(runs) - 1)))

  def _steps(self, count):
    """The batch makes steps and its work ends."""
    assert self.batch is not None
    runs = self.instance.runs
    emitted = Emitted(self.batch.tries, TokenSegment(0.0, 0.0, count))
    self.batch = None
    end = Completion(0, 'completed', 0.0, 0.0, steps=(emitted,))
    for effect in self.instance.on_decode(end):
      if isinstance(effect, Finished):
        (run,) = [
          r for r in self.here if r.request.request_id == effect.request_id
        ]
        self.here.remove(run)
        output = run.num_before + run.request.max_output_tokens
        assert effect.num_output_tokens == output
        self._end(run, go_on=False)
    for run in runs:
      self._release(run)
    self._go_on()

  def _end(self, run, go_on=True):
    """It ends; its pages go when no work uses them."""
    run.state = 'ended'
    self._apply(self.instance.leave(run))
    self._release(run)
    if go_on:
      self._go_on()

  def _release(self, run):
    if self.instance.release(run):
      self._apply(self.instance.came_free())

  def _go_on(self):
    while (run := self.instance.victim()) is not None:
      self._preempt(run)
    self._apply(self.instance.advance())

  def _preempt(self, run):
    """The youngest of those that are here; a put reads its pages."""
    youngest = max(self.here, key=lambda r: r.request.arrival_s)
    assert run is youngest and self.reserve == 'prompt'
    assert run.decode_uses == 0
    self.here.remove(run)
    run.state = 'preempted'
    self._apply(self.instance.leave(run))
    run.decode_uses += 1
    self.leaving.append(run)
    self.owed.append(run.next_leg(PAGE_TOKENS))
    self.read[run] = run.decode_pages

  def _read(self, run):
    del self.read[run]
    run.decode_uses -= 1
    self._release(run)
    self._go_on()

  def _apply(self, effects):
    for effect in effects:
      if isinstance(effect, Start):
        assert self.batch is None
        assert isinstance(effect.work.payload, DecodeBatch)
        self.batch = effect.work.payload


class AllMachine(DecodeMachine):
  """The same where pages for the whole output are held."""

  reserve = 'all'


SETTINGS = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDecode = DecodeMachine.TestCase
TestDecode.settings = SETTINGS
TestDecodeAll = AllMachine.TestCase
TestDecodeAll.settings = SETTINGS
