# SPDX-License-Identifier: Apache-2.0
"""A decode instance: continuous batching over reserved pages.

Pages for the prompt and the whole output are reserved before prefill starts,
so a run that decodes never lacks one. A run whose KVCache has all arrived is
inserted at the next step boundary and removed at its last token.

As in FAST'25 section 3.1, step 4. Differs: KVCache lands in device pages
directly (no stop in the node's host memory).
"""

from collections.abc import Callable

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import DecodeRow
from mooncake_jax.backend import RowTokens
from mooncake_jax.blocks.layout import KVLayout
from mooncake_jax.blocks.pool import PagePool
from mooncake_jax.events import Finished
from mooncake_jax.events import TokensEmitted
from mooncake_jax.instance.run import Effects
from mooncake_jax.instance.run import Run
from mooncake_jax.instance.run import RunKey
from mooncake_jax.instance.run import Start
from mooncake_jax.instance.run import Stop
from mooncake_jax.instance.run import Work

# Whether a batch of (rows, context tokens) would keep the TBT limit.
Recheck = Callable[[int, int], bool]


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
  ):
    """Makes an idle instance.

    Args:
      name: of the instance.
      layout: how KVCache is cut.
      num_pages: of its device pool, scratch included.
      max_batch: rows in a batch.
      max_steps: steps of one decode work.
      recheck: the local scheduler's double check after prefill, or None.
    """
    if max_batch < 1 or max_steps < 1:
      raise ValueError(f'{max_batch=} and {max_steps=} must be >= 1')
    self.name = name
    self.layout = layout
    self.pool = PagePool(num_pages)
    self.max_batch = max_batch
    self.max_steps = max_steps
    self.recheck = recheck
    self._rows: dict[RunKey, Run] = {}
    self._joining: dict[RunKey, Run] = {}
    # Accepted after prefill; their KVCache is under way.
    self._accepted: dict[RunKey, Run] = {}
    self._in_work: tuple[Run, ...] = ()
    self._work: Work | None = None

  def reserve(self, run: Run) -> bool:
    """Holds pages for all of the run's tokens; False if too few are free."""
    pages = self.pool.hold(self.layout.pages_for(run.num_tokens))
    if pages is None:
      return False
    run.decode_pages = pages
    return True

  def accepts(self, run: Run) -> bool:
    """Whether the TBT limit would hold with the run in the batch."""
    if self.recheck is None:
      return True
    runs = [
      *self._rows.values(),
      *self._joining.values(),
      *self._accepted.values(),
      run,
    ]
    if not self.recheck(len(runs), sum(self._context(r) for r in runs)):
      return False
    self._accepted[run.key] = run
    return True

  def emit(self, run: Run, row: RowTokens) -> Effects:
    """Counts emitted tokens; the last ones finish the run."""
    time_s = row.segment.last_s
    run.num_emitted += row.segment.count
    if row.tokens:
      run.last_token = row.tokens[-1]
    effects: Effects = [
      TokensEmitted(
        time_s, *run.key, self.name, row.segment, row.tokens, row.logprobs
      )
    ]
    if (
      run.num_emitted >= run.request.max_output_tokens
      or run.last_token in run.request.stop_token_ids
    ):
      effects.append(Finished(time_s, *run.key, self.name, run.num_emitted))
    return effects

  def join(self, run: Run) -> Effects:
    """All KVCache is here: the run enters at the next step boundary."""
    run.state = 'decoding'
    self._accepted.pop(run.key, None)
    self._joining[run.key] = run
    if self._work is None:
      return self._step()
    if len(self._rows) < self.max_batch:
      return [Stop(self._work)]
    return []

  def on_decode(self, completion: Completion) -> Effects:
    """Tokens came; at the end of the work the batch changes and goes on."""
    effects: Effects = []
    for row in completion.rows:
      run = self._rows.get((row.request_id, row.attempt))
      if run is not None and not run.ended:
        effects += self.emit(run, row)
    if completion.done:
      for run in self._in_work:
        run.decode_uses -= 1
      self._in_work, self._work = (), None
    return effects

  def leave(self, run: Run) -> Effects:
    """Takes an ended run out of the batch."""
    self._joining.pop(run.key, None)
    self._accepted.pop(run.key, None)
    if self._rows.pop(run.key, None) and self._work is not None:
      return [Stop(self._work)]
    return []

  def release(self, run: Run) -> bool:
    """Frees the run's decode pages once no work uses them."""
    if not run.ended or run.decode_uses or not run.decode_pages:
      return False
    self.pool.release(run.decode_pages)
    run.decode_pages = ()
    return True

  def advance(self) -> Effects:
    """Starts the next work if none is under way and there are rows."""
    return self._step() if self._work is None else []

  @property
  def runs(self) -> tuple[Run, ...]:
    """The runs in the batch under way."""
    return self._in_work

  def check(self) -> None:
    self.pool.check()
    assert len(self._rows) <= self.max_batch
    assert not set(self._rows) & set(self._joining)

  @property
  def is_free(self) -> bool:
    """Whether no run holds a page."""
    return self.pool.num_free == self.pool.capacity

  def _context(self, run: Run) -> int:
    return run.request.num_prompt_tokens + run.num_emitted

  def _step(self) -> Effects:
    """Inserts who waits, oldest first, and starts a work of the batch."""
    while self._joining and len(self._rows) < self.max_batch:
      key = next(iter(self._joining))
      self._rows[key] = self._joining.pop(key)
    if not self._rows:
      return []
    self._in_work = tuple(self._rows.values())
    for run in self._in_work:
      run.decode_uses += 1
    batch = DecodeBatch(tuple(self._row(run) for run in self._in_work))
    self._work = Work('decode', self.name, batch)
    return [Start(self._work)]

  def _row(self, run: Run) -> DecodeRow:
    request = run.request
    return DecodeRow(
      request.request_id,
      run.placement.attempt,
      run.last_token,
      request.num_prompt_tokens + run.num_emitted - 1,
      run.decode_pages,
      request.max_output_tokens - run.num_emitted,
      request.sampling,
      request.stop_token_ids,
    )
