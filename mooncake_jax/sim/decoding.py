# SPDX-License-Identifier: Apache-2.0
"""A decode work on the virtual clock: its steps in closed form."""

from dataclasses import dataclass
import math

from mooncake_jax.backend import Completion
from mooncake_jax.backend import DecodeBatch
from mooncake_jax.backend import RowTokens
from mooncake_jax.backend import WorkId
from mooncake_jax.costs.model import CostModel
from mooncake_jax.request import TokenSegment
from mooncake_jax.sim.clock import Due


@dataclass(eq=False)
class Decoding:
  """A decode work under way: step k of num_steps ends at step_end_s(k)."""

  work_id: WorkId
  batch: DecodeBatch
  start_s: float
  first_s: float
  interval_s: float
  num_steps: int
  due: Due | None = None

  @property
  def end_s(self) -> float:
    return self.step_end_s(self.num_steps)

  def step_end_s(self, step: int) -> float:
    return self.first_s + (step - 1) * self.interval_s

  def steps_by(self, time_s: float) -> int:
    """Steps until the first boundary at or after time_s; at least one."""
    return min(
      steps_until(self.first_s, self.interval_s, time_s), self.num_steps
    )

  def cut_short(self, time_s: float) -> bool:
    """Ends it at that boundary; whether this is sooner than it would."""
    before, self.num_steps = self.num_steps, self.steps_by(time_s)
    return self.num_steps < before

  def completion(self) -> Completion:
    """What it emitted by its end."""
    segment = TokenSegment(self.first_s, self.interval_s, self.num_steps)
    rows = tuple(
      RowTokens(row.request_id, row.attempt, segment) for row in self.batch.rows
    )
    return Completion(
      self.work_id, 'completed', self.start_s, self.end_s, rows=rows
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
  num_steps = min(max_steps, min(row.remaining for row in batch.rows))
  context = sum(row.position + 1 for row in batch.rows)
  first_s, interval_s = step_times(costs, num_rows, context, num_steps)
  return Decoding(work_id, batch, now_s, now_s + first_s, interval_s, num_steps)


def step_times(
  costs: CostModel, num_rows: int, context_tokens: int, num_steps: int
) -> tuple[float, float]:
  """Seconds of the first of some steps, and from each to the next.

  Contexts grow by a token a row and step, so the steps take longer and longer;
  all but the first are given the mean of the others.
  """
  first_s = costs.decode_step_s(num_rows, context_tokens)
  if num_steps == 1:
    return first_s, 0.0
  last_context = context_tokens + (num_steps - 1) * num_rows
  last_s = costs.decode_step_s(num_rows, last_context)
  total_s = num_steps * (first_s + last_s) / 2
  return first_s, (total_s - first_s) / (num_steps - 1)


def steps_until(first_s: float, interval_s: float, time_s: float) -> int:
  """Steps until the first boundary at or after time_s; at least one."""
  if not interval_s or time_s <= first_s:
    return 1
  # The small slack keeps a boundary hit exactly from rounding up.
  return 1 + math.ceil((time_s - first_s) / interval_s - 1e-9)
