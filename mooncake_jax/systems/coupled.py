# SPDX-License-Identifier: Apache-2.0
"""One instance that prefills and decodes, step after step, in virtual time.

All rows decode in the same steps, so what they emit is kept once, as a line of
segments, of which a row has the part between its entry and its end.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import heapq
import itertools
import math

from mooncake_jax.blocks.accounting import pages_for
from mooncake_jax.costs.model import Chunk
from mooncake_jax.costs.model import CostModel
from mooncake_jax.request import BlockKey
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord
from mooncake_jax.request import TokenSegment
from mooncake_jax.sim.decoding import steps_from
from mooncake_jax.systems.paged_memory import Held
from mooncake_jax.systems.paged_memory import PagedMemory

WATERMARK = 0.01  # of the memory, left free by new sequences


def watermark_pages(num_pages: int) -> int:
  """Pages of so many that a new sequence must leave free."""
  return math.ceil(WATERMARK * num_pages)


@dataclass(frozen=True)
class Rules:
  """What an instance goes by; see `vllm.py`."""

  prefix_caching: bool
  chunked_prefill: bool
  step_tokens: int
  max_batch: int
  num_pages: int
  page_tokens: int


@dataclass(eq=False)
class _Sequence:
  """A request on its way.

  Attributes:
    num_tokens: of its prompt, and of what it had emitted when it was
      preempted.
    computed: of these, how many have their KVCache.
    left: tokens that it still has to emit.
    joined: decode steps of the instance before its first, and `line` the
      segments before it.
    entry: its number among the rows, while it is one.
  """

  request: Request
  record: RequestRecord
  num_tokens: int
  left: int
  computed: int = 0
  held: Held = field(default_factory=Held)
  joined: int = 0
  line: int = 0
  entry: int | None = None


class Coupled:
  """State of one instance."""

  def __init__(
    self, name: str, rules: Rules, costs: CostModel, block_size_tokens: int
  ):
    if block_size_tokens % rules.page_tokens:
      raise ValueError(
        f'{block_size_tokens=} must be a multiple of '
        f'page_tokens={rules.page_tokens}'
      )
    self.name = name
    self._rules = rules
    self._costs = costs
    self._block_tokens = block_size_tokens
    block_pages = block_size_tokens // rules.page_tokens
    self.memory = PagedMemory(
      rules.num_pages,
      block_pages if rules.prefix_caching else 0,
      watermark_pages(rules.num_pages),
    )
    self._now_s = 0.0
    self._waiting: deque[_Sequence] = deque()
    self._begun: list[_Sequence] = []  # prompts of which some is computed
    self._rows: dict[int, _Sequence] = {}
    self._ends: list[tuple[int, int]] = []  # (decode step, entry)
    self._entries = itertools.count()
    self._context = 0  # tokens of all rows
    self._steps = 0  # decode steps made
    self._line: list[TokenSegment] = []
    # Decode steps under way; a new request ends them at a boundary.
    self._run: TokenSegment | None = None
    self._todo = 0  # tokens to prefill
    self._passing = 0  # of these, in the last pass

  def load(self, now_s: float) -> tuple[int, int]:
    """Tokens to prefill, those of the pass under way too; then requests."""
    passing = self._passing if self._now_s > now_s else 0
    begun = len(self._waiting) + len(self._begun)
    return self._todo + passing, begun + len(self._rows)

  def load_with(self, request: Request) -> tuple[int, int]:
    """`load` once it has a request that comes now, by what is cached."""
    todo, requests = self.load(request.arrival_s)
    cached = self.memory.num_cached(self._reusable(request))
    return (
      todo + request.num_prompt_tokens - cached * self._block_tokens,
      requests,
    )

  def submit(self, request: Request, record: RequestRecord) -> None:
    """Queues a request that comes now, once `advance` has been called."""
    record.prefill = record.decode = self.name
    sequence = _Sequence(
      request, record, request.num_prompt_tokens, request.max_output_tokens
    )
    self._todo += sequence.num_tokens
    self._waiting.append(sequence)
    if self._run is not None:
      self._cut_short(request.arrival_s)
    self._now_s = max(self._now_s, request.arrival_s)

  def advance(self, until_s: float) -> None:
    """Makes the steps that begin before `until_s`."""
    while self._now_s < until_s:
      if self._run is not None:
        if self._run.last_s > until_s:
          return
        self._end_run()
      elif batch := self._prompts():
        self._prefill(batch)
      elif self._rows:
        self._decode()
      else:
        return

  def finish(self) -> None:
    """Makes all steps that there are."""
    self.advance(math.inf)
    assert not self._waiting and not self._begun and not self._rows
    self.memory.check()

  # Which prompts are in a step.

  def _prompts(self) -> list[tuple[_Sequence, int]]:
    """Sequences and how many tokens of each the next step computes."""
    rules = self._rules
    budget, batch = rules.step_tokens, []
    if rules.chunked_prefill:
      budget -= len(self._rows)
      for sequence in self._begun:
        budget -= self._take(sequence, budget, batch)
    while self._waiting and budget > 0:
      sequence = self._waiting[0]
      if not rules.chunked_prefill and batch and sequence.num_tokens > budget:
        break
      if len(self._rows) + len(self._begun) >= rules.max_batch:
        break
      if not self._admit(sequence):
        break
      self._begun.append(self._waiting.popleft())
      if rules.chunked_prefill:
        budget -= self._take(sequence, budget, batch)
      else:
        batch.append((sequence, sequence.num_tokens - sequence.computed))
        budget -= sequence.num_tokens
    return batch

  def _take(
    self, sequence: _Sequence, budget: int, batch: list[tuple[_Sequence, int]]
  ) -> int:
    tokens = min(sequence.num_tokens - sequence.computed, budget)
    if tokens > 0:
      batch.append((sequence, tokens))
    return max(tokens, 0)

  def _admit(self, sequence: _Sequence) -> bool:
    held = self.memory.admit(
      self._reusable(sequence.request), self._pages(sequence.num_tokens)
    )
    if held is None:
      return False
    sequence.held = held
    sequence.computed = len(held.blocks) * self._block_tokens
    self._todo -= sequence.computed
    record = sequence.record
    if record.prefill_start_s is None:
      record.fetch_start_s = record.prefill_start_s = self._now_s
      if sequence.computed:
        record.reused_tokens = {'local_device': sequence.computed}
    return True

  def _reusable(self, request: Request) -> Sequence[BlockKey]:
    """The last token is computed in any case, for its logits."""
    most = (request.num_prompt_tokens - 1) // self._block_tokens
    return request.block_keys[:most]

  def _pages(self, num_tokens: int) -> int:
    return pages_for(num_tokens, self._rules.page_tokens)

  # Steps.

  def _prefill(self, batch: list[tuple[_Sequence, int]]) -> None:
    """One step: a pass over some tokens, rows riding along if chunked."""
    chunks = [Chunk(tokens, sequence.computed) for sequence, tokens in batch]
    pass_s = self._costs.pass_s(chunks)
    stop_s = self._now_s + pass_s
    rides = self._rules.chunked_prefill and bool(self._rows)
    if rides and not self._make_room(1):
      return  # somebody was preempted: look again
    if rides:
      stop_s += self._costs.riding_s(len(self._rows), self._context)
    self._now_s = stop_s
    self._passing = sum(tokens for _, tokens in batch)
    for (sequence, tokens), share in zip(batch, self._shares(chunks)):
      sequence.computed += tokens
      self._todo -= tokens
      sequence.record.prefill_s += pass_s * share
    if rides:
      self._emit(TokenSegment(stop_s, 0.0, 1))
    for sequence, _ in batch:
      if sequence.computed == sequence.num_tokens:
        self._begun.remove(sequence)
        self._first_token(sequence)

  def _shares(self, chunks: Sequence[Chunk]) -> list[float]:
    """Whose a pass's time is: by what each chunk would take alone."""
    alone_s = [self._costs.prefill_s(*chunk) for chunk in chunks]
    total_s = sum(alone_s) or math.inf
    return [seconds / total_s for seconds in alone_s]

  def _first_token(self, sequence: _Sequence) -> None:
    """Its prompt is computed, and that gives a token."""
    record, now_s = sequence.record, self._now_s
    self.memory.publish(sequence.held, sequence.request.block_keys)
    if record.first_token_s is None:
      record.prefill_done_s = record.kv_arrived_s = now_s
      record.first_token_s = now_s
    record.segments.append(TokenSegment(now_s, 0.0, 1))
    sequence.num_tokens += 1
    sequence.left -= 1
    if not sequence.left:
      self._close(sequence)
      return
    sequence.joined, sequence.line = self._steps, len(self._line)
    sequence.entry = next(self._entries)
    self._rows[sequence.entry] = sequence
    end = self._steps + sequence.left
    heapq.heappush(self._ends, (end, sequence.entry))
    self._context += sequence.num_tokens

  def _decode(self) -> None:
    """Begins steps of all rows until one ends or memory does."""
    while self._ends[0][1] not in self._rows:  # it was preempted
      heapq.heappop(self._ends)
    num_steps = self._ends[0][0] - self._steps
    while num_steps > 1 and not self._has_room(num_steps):
      num_steps //= 2
    if not self._make_room(num_steps):
      return
    self._run = steps_from(
      self._now_s, self._costs, len(self._rows), self._context, num_steps
    )

  def _cut_short(self, time_s: float) -> None:
    run = self._run
    assert run is not None
    self._run = run.until(time_s)
    self._end_run()

  def _end_run(self) -> None:
    run, self._run = self._run, None
    assert run is not None
    self._now_s = run.last_s
    self._emit(run)

  def _emit(self, segment: TokenSegment) -> None:
    """Each row has made these steps; those that are done leave."""
    self._line.append(segment)
    self._steps += segment.count
    self._context += segment.count * len(self._rows)
    while self._ends and self._ends[0][0] <= self._steps:
      entry = heapq.heappop(self._ends)[1]
      if entry in self._rows:
        sequence = self._rows[entry]
        self._leave(sequence)
        self._close(sequence)

  def _leave(self, sequence: _Sequence) -> None:
    """Takes a row out; it has what was emitted since its entry."""
    assert sequence.entry is not None
    del self._rows[sequence.entry]
    made = self._steps - sequence.joined
    self._context -= sequence.num_tokens + made
    sequence.num_tokens += made
    sequence.left -= made
    sequence.record.segments += self._line[sequence.line :]

  def _close(self, sequence: _Sequence) -> None:
    self.memory.release(sequence.held)
    sequence.record.finished_s = self._now_s
    sequence.record.outcome = 'completed'

  # Memory of rows.

  def _lack(self, sequence: _Sequence, num_steps: int) -> int:
    """Pages that a row lacks for its next steps."""
    tokens = sequence.num_tokens + self._steps - sequence.joined + num_steps - 1
    blocks = len(sequence.held.blocks) * self._block_tokens
    return max(self._pages(tokens - blocks) - sequence.held.pages, 0)

  def _has_room(self, num_steps: int) -> bool:
    lack = sum(self._lack(row, num_steps) for row in self._rows.values())
    return lack <= self.memory.num_available

  def _make_room(self, num_steps: int) -> bool:
    """Gives rows their pages; if there are too few the youngest is preempted.

    Returns:
      Whether all have theirs.
    """
    if not self._has_room(num_steps):
      self._preempt(max(self._rows.values(), key=_age))
      return False
    for row in self._rows.values():
      if lack := self._lack(row, num_steps):
        self.memory.grow(row.held, lack)
    return True

  def _preempt(self, sequence: _Sequence) -> None:
    """It starts anew, with what it emitted as part of its prompt."""
    self._leave(sequence)
    self.memory.release(sequence.held)
    record = sequence.record
    record.preemptions += 1
    record.recomputed_tokens += sequence.num_tokens
    sequence.computed, sequence.entry = 0, None
    self._todo += sequence.num_tokens
    self._waiting.appendleft(sequence)


def _age(sequence: _Sequence) -> tuple[float, str]:
  return sequence.request.arrival_s, sequence.request.request_id
