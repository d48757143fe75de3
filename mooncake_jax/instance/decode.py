# SPDX-License-Identifier: Apache-2.0
"""A decode instance: continuous batching over pages of one pool.

A run whose KVCache has all arrived is inserted at the next step boundary and
removed at its last token. Its pages are held before its prefill starts: for
prompt and whole output, so that it never lacks one, or for the prompt alone.
Then it takes more as it goes on, the oldest request first. One that finds none
sits out the steps until some come free; where nobody is about to give any, the
youngest is preempted (`victim`). So the oldest always goes on, and nobody
waits in a circle: who holds pages decodes, is on its way here or is leaving.

As in FAST'25 section 3.1, step 4. Differs: KVCache lands in device pages
directly (no stop in the node's host memory).
"""

from collections.abc import Callable
from collections.abc import Sequence

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.pool import PagePool
from mooncake_jax.cluster_spec import Reserve
from mooncake_jax.events import Finished
from mooncake_jax.events import TokensEmitted
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import RunKey
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Stop
from mooncake_jax.instance.run import Work
from mooncake_jax.request import Emitted
from mooncake_jax.request import Request

# Whether a request would keep the TBT limit at a decode instance, in a batch of
# (rows, context tokens).
Recheck = Callable[[Request, str, int, int], bool]


class DecodeInstance:
  """State of one decode instance."""

  def __init__(
    self,
    name: str,
    layout: KVLayout,
    num_pages: int,
    max_batch: int,
    max_steps: int,
    recheck: Recheck | None = None,
    reserve: Reserve = 'all',
  ):
    """Makes an idle instance.

    Args:
      name: of the instance.
      layout: how KVCache is cut.
      num_pages: of its device pool, scratch included.
      max_batch: rows in a batch.
      max_steps: steps of one decode work.
      recheck: the local scheduler's double check after prefill, or None.
      reserve: see `ClusterSpec.decode_reserve`.
    """
    if max_batch < 1 or max_steps < 1:
      raise ValueError(f'{max_batch=} and {max_steps=} must be >= 1')
    self.name = name
    self.layout = layout
    self.pool = PagePool(num_pages)
    self.max_batch = max_batch
    self.max_steps = max_steps
    self.recheck = recheck
    self._grows = reserve == 'prompt'
    # Who holds pages, whatever it does.
    self._holders: dict[RunKey, Run] = {}
    # Preempted and not yet back: nobody new is let in before them.
    self._owed: set[RunKey] = set()
    # Refused pages so far, in the order in which they first asked.
    self._waiting: dict[RunKey, None] = {}
    self._rows: dict[RunKey, Run] = {}
    self._joining: dict[RunKey, Run] = {}
    # Accepted after prefill; their KVCache is under way.
    self._accepted: dict[RunKey, Run] = {}
    self._in_work: tuple[Run, ...] = ()
    self._work: Work | None = None

  def reserve(self, run: Run) -> bool:
    """Holds the pages that it needs to begin; False if too few are free.

    First come first served: one that needs many would else wait for as long as
    others come that need few. Where runs grow, those that are here are left a
    page each to do so, and who was preempted comes first.
    """
    self._waiting.setdefault(run.key)
    is_first = next(iter(self._waiting)) == run.key and not self._owed
    if not is_first and not run.num_before:
      return False
    num_tokens = run.num_tokens
    spare = 0
    if self._grows:
      num_tokens = min(num_tokens, run.request.num_prompt_tokens + 1)
      spare = len(self._holders)
    need = self.layout.pages_for(num_tokens)
    pages = self.pool.hold(need) if self.pool.num_free - need >= spare else None
    if pages is None:
      return False
    run.decode_pages = pages
    self._holders[run.key] = run
    self._owed.discard(run.key)
    del self._waiting[run.key]
    return True

  def accepts(self, run: Run) -> bool:
    """Whether the TBT limit would hold with the run in the batch.

    One that was preempted was let in before.
    """
    if self.recheck is None:
      return True
    if run.num_before:
      self._accepted[run.key] = run
      return True
    runs = [
      *self._rows.values(),
      *self._joining.values(),
      *self._accepted.values(),
      run,
    ]
    tokens = sum(r.context_tokens for r in runs)
    if not self.recheck(run.request, self.name, len(runs), tokens):
      return False
    self._accepted[run.key] = run
    return True

  def emit(self, runs: Sequence[Run], emitted: Emitted) -> Effects:
    """Counts the tokens that runs emitted; the last ones finish a run."""
    time_s, count = emitted.segment.last_s, emitted.segment.count
    effects: Effects = [TokensEmitted(time_s, self.name, emitted)]
    for run in runs:
      run.num_emitted += count
    for run, token in zip(runs, emitted.tokens):
      run.last_token = token
      run.output.append(token)
    for run in runs:
      if run.has_emitted_all:
        effects.append(
          Finished(time_s, *run.key, self.name, run.num_output_tokens)
        )
    return effects

  def join(self, run: Run) -> Effects:
    """All KVCache is here: the run enters at the next step boundary."""
    run.state = 'decoding'
    self._accepted.pop(run.key, None)
    self._joining[run.key] = run
    if self._work is not None and len(self._rows) < self.max_batch:
      return [Stop(self._work)]
    return []

  def on_decode(self, completion: Completion) -> Effects:
    """Tokens came; at the end of the work the batch changes and goes on."""
    effects: Effects = []
    for emitted in completion.steps:
      found = [self._rows.get(key) for key in emitted.tries]
      runs = [run for run in found if run is not None and not run.ended]
      if len(runs) < len(found):
        emitted = emitted.of([i for i, r in enumerate(found) if r in runs])
      if runs:
        effects += self.emit(runs, emitted)
    if completion.done:
      for run in self._in_work:
        run.decode_uses -= 1
      self._in_work, self._work = (), None
    return effects

  def leave(self, run: Run) -> Effects:
    """Takes a run that ended or was preempted out of the batch."""
    self._joining.pop(run.key, None)
    self._accepted.pop(run.key, None)
    if run.state == 'preempted':
      self._owed.add(run.key)
    if self._rows.pop(run.key, None) and self._work is not None:
      return [Stop(self._work)]
    return []

  def release(self, run: Run) -> bool:
    """Frees the run's decode pages once no work uses them.

    Returns:
      Whether others may be let in now that were not before.
    """
    was_before = run.ended and (
      run.key in self._owed or run.key in self._waiting
    )
    if was_before:
      self._owed.discard(run.key)
      self._waiting.pop(run.key, None)
    if not run.has_left or run.decode_uses or not run.decode_pages:
      return was_before
    self.pool.release(run.decode_pages)
    run.decode_pages = ()
    del self._holders[run.key]
    return True

  def victim(self) -> Run | None:
    """Who has to be preempted before `advance`, if anybody.

    The youngest, so that the oldest row that lacks a page gets one; unless
    pages will come free anyway, or it is the youngest itself and others go on.
    """
    if self._work is not None or not self._grows:
      return None
    self._insert()
    starved = self._grow(1)
    coming = sum(
      len(run.decode_pages) for run in self._holders.values() if run.has_left
    )
    if coming >= len(starved):
      return None
    youngest = max([*self._rows.values(), *self._joining.values()], key=_age)
    if youngest is starved[0] and (
      not self._joining or len(starved) < len(self._rows)
    ):
      return None
    return youngest

  def advance(self) -> Effects:
    """Starts the next work if none is under way and there are rows."""
    return self._step() if self._work is None else []

  def came_free(self) -> Effects:
    """Pages did: who sat out for want of one is let in again."""
    if self._work is None or len(self._in_work) == len(self._rows):
      return []
    return [Stop(self._work)]

  @property
  def runs(self) -> tuple[Run, ...]:
    """The runs in the batch under way."""
    return self._in_work

  def check(self) -> None:
    self.pool.check()
    assert len(self._rows) <= self.max_batch
    assert not set(self._rows) & set(self._joining)
    held = [page for r in self._holders.values() for page in r.decode_pages]
    assert len(held) == self.pool.capacity - self.pool.num_free, self.name
    assert len(set(held)) == len(held), f'{self.name}: a page has two runs'

  @property
  def is_free(self) -> bool:
    """Whether no run holds a page."""
    return self.pool.num_free == self.pool.capacity

  def _insert(self) -> None:
    """Takes in who waits, first come first served."""
    while self._joining and len(self._rows) < self.max_batch:
      key = next(iter(self._joining))
      self._rows[key] = self._joining.pop(key)

  def _lack(self, run: Run, num_steps: int) -> int:
    """Pages that the run lacks for its next steps, or fewer to its end."""
    left = run.request.max_output_tokens - run.num_emitted
    num_tokens = run.context_tokens - 1 + min(num_steps, left)
    return self.layout.pages_for(num_tokens) - len(run.decode_pages)

  def _grow(self, num_steps: int) -> list[Run]:
    """Gives rows pages for their next steps; returns those that lack some.

    Oldest first, and nobody is passed over: pages that do not do for one are
    not given to a younger one.
    """
    rows = sorted(self._rows.values(), key=_age)
    for i, run in enumerate(rows):
      need = self._lack(run, num_steps)
      pages = self.pool.hold(need) if need > 0 else ()
      if pages is None:
        return [r for r in rows[i:] if self._lack(r, num_steps) > 0]
      run.decode_pages += pages
    return []

  def _step(self) -> Effects:
    """Starts a work of all rows that have a page for its first step."""
    self._insert()
    rows = [*self._rows.values()]
    if self._grows and (starved := self._grow(1)):
      rows = [run for run in rows if run not in starved]
    elif self._grows:
      self._grow(self._affordable_steps())
    if not rows:
      return []
    self._in_work = tuple(rows)
    for run in self._in_work:
      run.decode_uses += 1
    batch = DecodeBatch(tuple(self._row(run) for run in self._in_work))
    self._work = Work('decode', self.name, batch)
    return [Start(self._work)]

  def _affordable_steps(self) -> int:
    """As many of the steps as all rows find pages for; one, they have."""
    num_steps = self.max_steps
    while num_steps > 1:
      need = sum(max(self._lack(r, num_steps), 0) for r in self._rows.values())
      if need <= self.pool.num_free:
        break
      num_steps //= 2
    return num_steps

  def _row(self, run: Run) -> DecodeRow:
    request, position = run.request, run.context_tokens - 1
    room = len(run.decode_pages) * self.layout.page_tokens - position
    return DecodeRow(
      request.request_id,
      run.placement.attempt,
      run.last_token,
      position,
      run.decode_pages,
      min(room, request.max_output_tokens - run.num_emitted),
      request.sampling,
      request.stop_token_ids,
    )


def _age(run: Run) -> tuple[float, str, int]:
  """Orders runs by when their requests came, the oldest first."""
  return run.request.arrival_s, *run.key
