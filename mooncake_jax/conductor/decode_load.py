# SPDX-License-Identifier: Apache-2.0
"""Believed load of the decode instances, as arrays.

A request reserves room from its placement to its end, rounded up to pages, as
the instance itself does: for prompt and longest output, or (`decode_reserve`)
for the prompt at first and then some steps ahead, as far as there is room.
Where there is none to begin with it waits, first come first served, and
reserves nothing yet; whoever was preempted waits before all others. So what is
reserved never exceeds what there is. A request is active once its first token
came; before, it is expected.

Arrays have one number an instance (suffix I), in the order of `names`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mooncake_jax.conductor.decode_rows import DecodeRows
from mooncake_jax.conductor.work_costs import InstanceBelief
from mooncake_jax.conductor.work_costs import StepCosts


@dataclass
class _Held:
  """A request at one instance."""

  i: int
  row: int
  need_tokens: int
  whole_tokens: int
  context_tokens: int
  left_tokens: int
  active: bool = False
  waits: bool = False


class DecodeLoads:
  """Rows, context and room of all decode instances.

  Attributes:
    rows_I, context_tokens_I: of all requests placed there.
    left_tokens_I: the sum of what each may still emit at most.
    active_rows_I, active_tokens_I: the same of those that decode already.
    requests: the requests of each instance.
    reserved_tokens_I: at most `capacity_tokens_I`.
    base_s_I, row_s_I, token_s_I: a step's seconds: of any, a row, a token of
      context.
    step_s_I: of a step with all that decode there.
    mean_row_s_I: what one of all rows, with its context, adds to a step.
    mean_left_I: tokens that one of them may still emit, at least 1.
    active_I, coming_I, batch_I: numbers of rows that decode, do not yet, and
      can at once, as float.
    least_batch: rows that any of them can take.
    free_tokens_I: what a new request may reserve, as float.
    has_row_I: whether the batch is not full.
  """

  def __init__(
    self,
    page_tokens: int,
    steps_ahead: int | None = None,
    instances: Iterable[tuple[str, InstanceBelief, StepCosts]] = (),
  ):
    """Instances of pages of this size.

    Args:
      steps_ahead: for which rows take pages as they go on; None: they have
        them all from the beginning.
    """
    self._page_tokens = page_tokens
    self._steps_ahead = steps_ahead
    self.names: list[str] = []
    self.row: dict[str, int] = {}
    self.step: list[StepCosts] = []
    self._held: dict[str, _Held] = {}
    self.requests: list[DecodeRows] = []
    self._waiting: list[dict[str, int]] = []
    self.accepts_I = np.zeros(0, bool)
    for name, kind in _ARRAYS.items():
      setattr(self, name, np.zeros(0, kind))
    for name, belief, step in instances:
      self.join(name, belief, step)

  rows_I: np.ndarray
  context_tokens_I: np.ndarray
  left_tokens_I: np.ndarray
  active_rows_I: np.ndarray
  active_tokens_I: np.ndarray
  reserved_tokens_I: np.ndarray
  capacity_tokens_I: np.ndarray
  max_batch_I: np.ndarray
  base_s_I: np.ndarray
  row_s_I: np.ndarray
  token_s_I: np.ndarray
  step_s_I: np.ndarray
  mean_row_s_I: np.ndarray
  mean_left_I: np.ndarray
  active_I: np.ndarray
  coming_I: np.ndarray
  batch_I: np.ndarray
  least_batch: int
  free_tokens_I: np.ndarray
  has_row_I: np.ndarray

  def join(self, name: str, belief: InstanceBelief, step: StepCosts) -> None:
    """An empty instance; one that was here before takes requests again."""
    if name not in self.row:
      self.row[name] = len(self.names)
      self.names.append(name)
      self.step.append(step)
      self.requests.append(DecodeRows())
      self._waiting.append({})
      self.accepts_I = np.append(self.accepts_I, True)
      for array, kind in _ARRAYS.items():
        longer = np.append(getattr(self, array), np.zeros(1, kind))
        setattr(self, array, longer)
    i = self.row[name]
    self.step[i] = step
    self.accepts_I[i] = True
    self.base_s_I[i] = step.base_s
    self.row_s_I[i] = step.per_row_s
    self.token_s_I[i] = step.per_context_token_s
    self.capacity_tokens_I[i] = belief.decode_pool_tokens
    self.batch_I[i] = self.max_batch_I[i] = belief.max_batch
    self.least_batch = int(self.max_batch_I.min())
    self._derive(i)

  def close(self, name: str) -> None:
    """Takes no more requests."""
    if name in self.row:
      self.accepts_I[self.row[name]] = False

  def whole_tokens(self, prompt_tokens: int, max_output_tokens: int) -> int:
    """Room a request takes in the end: the last token's KVCache is never
    computed."""
    return self._in_pages(prompt_tokens + max_output_tokens - 1)

  def need_tokens(self, prompt_tokens: int, max_output_tokens: int) -> int:
    """Room a request takes to begin with."""
    whole = self.whole_tokens(prompt_tokens, max_output_tokens)
    if self._steps_ahead is None:
      return whole
    return min(whole, self._in_pages(prompt_tokens + 1))

  def add(
    self,
    name: str,
    request_id: str,
    prompt_tokens: int,
    max_output_tokens: int,
    first_s: float,
    tail: float = 1.0,
  ) -> None:
    """Counts a request whose first token is expected at `first_s`.

    Args:
      tail: its TBT in steps.
    """
    need = self.need_tokens(prompt_tokens, max_output_tokens)
    i = self.row[name]
    row = self.requests[i].add(first_s, prompt_tokens, max_output_tokens, tail)
    whole = self.whole_tokens(prompt_tokens, max_output_tokens)
    held = _Held(i, row, need, whole, prompt_tokens, max_output_tokens)
    self._held[request_id] = held
    self.rows_I[i] += 1
    self.context_tokens_I[i] += prompt_tokens
    self.left_tokens_I[i] += max_output_tokens
    self._waiting[i][request_id] = need
    held.waits = True
    self._admit(i)

  def grow(
    self, name: str, request_ids: Iterable[str], num_tokens: int
  ) -> None:
    """Requests there emitted tokens; the first ones make one active.

    Ignores those that are not there.
    """
    i = self.row[name]
    for request_id in request_ids:
      held = self._held.get(request_id)
      if held is not None and held.i == i:
        self._grow(held, num_tokens)
    self._derive(i)

  def _grow(self, held: _Held, num_tokens: int) -> None:
    i, rows = held.i, self.requests[held.i]
    if not held.active:
      held.active = True
      self.active_rows_I[i] += 1
      self.active_tokens_I[i] += held.context_tokens
    held.context_tokens += num_tokens
    self.context_tokens_I[i] += num_tokens
    self.active_tokens_I[i] += num_tokens
    emitted = min(num_tokens, held.left_tokens)
    held.left_tokens -= emitted
    self.left_tokens_I[i] -= emitted
    rows.context_R[held.row] = held.context_tokens
    rows.left_R[held.row] = held.left_tokens
    self._take_pages(held)

  def preempt(self, request_id: str) -> None:
    """It lost its pages and comes before all that wait for some."""
    held = self._held.get(request_id)
    if held is None or held.waits:
      return
    i = held.i
    if held.active:
      held.active = False
      self.active_rows_I[i] -= 1
      self.active_tokens_I[i] -= held.context_tokens
    self.reserved_tokens_I[i] -= held.need_tokens
    again = self._in_pages(held.context_tokens + 1)
    held.need_tokens = min(held.whole_tokens, again)
    held.waits = True
    first = {request_id: held.need_tokens}
    self._waiting[i] = first | self._waiting[i]
    self._derive(i)

  def begins(self, request_id: str, first_s: float) -> None:
    """Its first token came then. Ignores one that is not there."""
    held = self._held.get(request_id)
    if held is not None:
      self.requests[held.i].first_s_R[held.row] = first_s

  def remove(self, request_id: str) -> None:
    """Ignores one that is not there."""
    held = self._held.pop(request_id, None)
    if held is None:
      return
    i = held.i
    self.requests[i].remove(held.row)
    self.rows_I[i] -= 1
    self.context_tokens_I[i] -= held.context_tokens
    self.left_tokens_I[i] -= held.left_tokens
    if held.active:
      self.active_rows_I[i] -= 1
      self.active_tokens_I[i] -= held.context_tokens
    if held.waits:
      del self._waiting[i][request_id]
    else:
      self.reserved_tokens_I[i] -= held.need_tokens
    self._admit(i)

  def batch_step_s(self, i: int, rows: int, context_tokens: int) -> float:
    """A step at instance i, which takes no more of the rows than it can."""
    batch = min(rows, self.max_batch_I.item(i))
    return self.step[i].exact(batch, context_tokens * batch // rows)

  def num_waiting(self, i: int) -> int:
    """Requests at instance i that wait for room."""
    return len(self._waiting[i])

  def waiting_tokens(self, i: int) -> int:
    """Room that those before a new request at instance i wait for."""
    return sum(self._waiting[i].values())

  def check(self) -> None:
    """Raises AssertionError unless the sums are those of the requests."""
    assert (self.reserved_tokens_I <= self.capacity_tokens_I).all()
    for i in range(len(self.names)):
      here = [held for held in self._held.values() if held.i == i]
      reserved = sum(held.need_tokens for held in here if not held.waits)
      assert self.rows_I[i] == len(here), self.names[i]
      assert self.reserved_tokens_I[i] == reserved, self.names[i]
      assert self.left_tokens_I[i] == sum(held.left_tokens for held in here)
      derived = [getattr(self, name)[i] for name in _ARRAYS]
      self._derive(i)
      assert derived == [getattr(self, name)[i] for name in _ARRAYS]

  def __len__(self) -> int:
    """Requests at all instances."""
    return len(self._held)

  def _in_pages(self, tokens: int) -> int:
    return -(-tokens // self._page_tokens) * self._page_tokens

  def _take_pages(self, held: _Held) -> None:
    """A row that decodes takes pages ahead, as far as there are any."""
    if self._steps_ahead is None or held.waits:
      return
    ahead = self._in_pages(held.context_tokens + self._steps_ahead)
    more = min(ahead, held.whole_tokens) - held.need_tokens
    free = self.capacity_tokens_I.item(held.i) - self.reserved_tokens_I.item(
      held.i
    )
    more = max(min(more, free), 0)
    held.need_tokens += more
    self.reserved_tokens_I[held.i] += more

  def _spare_tokens(self, i: int) -> int:
    """Newcomers leave a page to each that has some, where rows take more."""
    if self._steps_ahead is None:
      return 0
    holders = self.rows_I.item(i) - len(self._waiting[i])
    return self._page_tokens * holders

  def _admit(self, i: int) -> None:
    """Reserves for those who wait, oldest first, while there is room."""
    waiting = self._waiting[i]
    while waiting:
      request_id, need = next(iter(waiting.items()))
      taken = self.reserved_tokens_I.item(i) + self._spare_tokens(i)
      if taken + need > self.capacity_tokens_I.item(i):
        break
      del waiting[request_id]
      self._held[request_id].waits = False
      self.reserved_tokens_I[i] += need
    self._derive(i)

  def _derive(self, i: int) -> None:
    """What follows from row i's counts, so that no placement works it out."""
    rows, tokens = self.rows_I.item(i), self.context_tokens_I.item(i)
    row_s, token_s = self.row_s_I.item(i), self.token_s_I.item(i)
    some_rows = rows or 1
    self.mean_row_s_I[i] = row_s + token_s * tokens / some_rows
    self.mean_left_I[i] = max(self.left_tokens_I.item(i) / some_rows, 1.0)
    active_rows = self.active_rows_I.item(i)
    step_s = self.base_s_I.item(i) + row_s * active_rows
    self.step_s_I[i] = step_s + token_s * self.active_tokens_I.item(i)
    self.active_I[i], self.coming_I[i] = active_rows, rows - active_rows
    reserved_tokens = self.reserved_tokens_I.item(i) + self._spare_tokens(i)
    self.free_tokens_I[i] = self.capacity_tokens_I.item(i) - reserved_tokens
    self.has_row_I[i] = rows < self.max_batch_I.item(i)


_ARRAYS: dict[str, type] = {
  'rows_I': np.int64,
  'context_tokens_I': np.int64,
  'left_tokens_I': np.int64,
  'active_rows_I': np.int64,
  'active_tokens_I': np.int64,
  'reserved_tokens_I': np.int64,
  'capacity_tokens_I': np.int64,
  'max_batch_I': np.int64,
  'base_s_I': np.float64,
  'row_s_I': np.float64,
  'token_s_I': np.float64,
  'step_s_I': np.float64,
  'mean_row_s_I': np.float64,
  'mean_left_I': np.float64,
  'active_I': np.float64,
  'coming_I': np.float64,
  'batch_I': np.float64,
  'free_tokens_I': np.float64,
  'has_row_I': np.bool_,
}
