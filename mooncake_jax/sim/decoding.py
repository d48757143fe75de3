# SPDX-License-Identifier: Apache-2.0
"""A decode work on the virtual clock: its steps in closed form."""

from dataclasses import dataclass
from dataclasses import replace

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import WorkId
from mooncake_jax.costs.model import CostModel
from mooncake_jax.request import Emitted
from mooncake_jax.request import TokenSegment
from mooncake_jax.sim.clock import Due


@dataclass(eq=False, slots=True)
class Decoding:
  """A decode work under way, whose rows emit `steps`, a token a step."""

  work_id: WorkId
  batch: DecodeBatch
  start_s: float
  steps: TokenSegment
  due: Due | None = None

  @property
  def end_s(self) -> float:
    return self.steps.last_s

  @property
  def next_token_s(self) -> float:
    """When the next token that was not told comes."""
    return self.steps.first_s

  def cut_short(self, time_s: float) -> bool:
    """Ends it at the first boundary; whether this is sooner than it would."""
    before, self.steps = self.steps.count, self.steps.until(time_s)
    return self.steps.count < before

  def progress(self, now_s: float) -> Completion | None:
    """Tokens that came before `now_s`; its end tells the rest, at least one."""
    if self.steps.first_s >= now_s:
      return None
    count = self.steps.until(now_s).count - 1
    if not count:
      return None
    told, self.steps = self.steps, self.steps.without(count)
    told = replace(told, count=count)
    return replace(self._emitted(told), done=False)

  def completion(self) -> Completion:
    """What it emitted by its end."""
    return self._emitted(self.steps)

  def _emitted(self, steps: TokenSegment) -> Completion:
    emitted = Emitted(self.batch.tries, steps)
    return Completion(
      self.work_id, 'completed', self.start_s, steps.last_s, steps=(emitted,)
    )


def decoding(
  work_id: WorkId,
  costs: CostModel,
  batch: DecodeBatch,
  max_steps: int,
  now_s: float,
) -> Decoding:
  """Steps of `batch` from now until a row ends or `max_steps`."""
  num_rows = len(batch.rows)
  num_steps = min(max_steps, min([row.remaining for row in batch.rows]))
  context = sum([row.position for row in batch.rows]) + num_rows
  steps = steps_from(now_s, costs, num_rows, context, num_steps)
  return Decoding(work_id, batch, now_s, steps)


def steps_from(
  now_s: float,
  costs: CostModel,
  num_rows: int,
  context_tokens: int,
  num_steps: int,
) -> TokenSegment:
  """When steps end, the first of which begins now.

  Contexts grow by a token a row and step. Steps take longer by as much each
  time: exact for costs linear in the context, else so that the first and the
  last are.
  """
  first_s = costs.decode_step_s(num_rows, context_tokens)
  if num_steps == 1:
    return TokenSegment(now_s + first_s, 0.0, 1)
  last_context = context_tokens + (num_steps - 1) * num_rows
  last_s = costs.decode_step_s(num_rows, last_context)
  growth_s = (last_s - first_s) / (num_steps - 1)
  return TokenSegment(now_s + first_s, first_s + growth_s, num_steps, growth_s)
