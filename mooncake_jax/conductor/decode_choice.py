# SPDX-License-Identifier: Apache-2.0
"""Where to decode: SelectDecodingInstance, by TBT over the expected life.

The request joins its batch when its prefill ends and stays for as many steps
as it is expected to emit tokens. Meanwhile contexts grow by a token a step and
rows end: of n rows that have r steps left on average n * exp(-k / r) are there
after k steps (see `running_mean`). The mean step over that life decides; an
instance without room for the request comes after all that have some.
"""

import math
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.arrays import ONE
from mooncake_jax.conductor.arrays import pick
from mooncake_jax.conductor.decode_load import DecodeLoads
from mooncake_jax.request import Request


class DecodeChoice(NamedTuple):
  """A decode instance for a request.

  Attributes:
    tbt_s: the longest step expected while the request is there.
    wait_s: until there is room for it; its prefill is held back so long.
  """

  row: int
  tbt_s: float
  wait_s: float


class DecodeView(NamedTuple):
  """What each instance would be with the request in it, [I].

  Attributes:
    mean_step_s_I: over the request's life.
    has_room_I: whether it could join at once.
    capacity_tokens_I: room if nobody else were there.
    need_tokens: the request's.
  """

  mean_step_s_I: np.ndarray
  has_room_I: np.ndarray
  capacity_tokens_I: np.ndarray
  need_tokens: int

  @property
  def fits_I(self) -> np.ndarray:
    """Whether it could ever join."""
    return self.capacity_tokens_I >= self.need_tokens

  def best(self, able_I: np.ndarray, number: int) -> int | None:
    """The able row of least step, see `pick`; None where it fits nowhere."""
    room_I = able_I & self.has_room_I
    if not np.count_nonzero(room_I):
      room_I = able_I & self.fits_I
      if not np.count_nonzero(room_I):
        return None
    return pick(self.mean_step_s_I, room_I, number)


def choose_decode(
  loads: DecodeLoads,
  request: Request,
  able_I: np.ndarray,
  mean_tokens: float,
  now_s: float,
  until_s: float,
  factor_I: np.ndarray,
  number: int,
) -> DecodeChoice | None:
  """The instance of least mean step; None where the request never fits.

  Args:
    able_I: which of them may be taken.
    until_s: seconds from now until the request joins.
    number: of equally good ones it takes this one, round and round.
  """
  prompt, most = request.num_prompt_tokens, request.max_output_tokens
  view = decode_view(loads, prompt, most, mean_tokens, until_s, factor_I)
  i = view.best(able_I, number)
  if i is None:
    return None
  wait_s = 0.0
  if not view.has_room_I.item(i):
    wait_s = room_wait_s(loads, i, view.need_tokens, mean_tokens)
  tbt_s = longest_step_s(
    loads,
    i,
    prompt,
    now_s + max(until_s, wait_s),
    min(mean_tokens, most),
    mean_tokens,
  )
  return DecodeChoice(i, float(factor_I[i]) * tbt_s, wait_s)


def decode_view(
  loads: DecodeLoads,
  prompt_tokens: int,
  max_output_tokens: int,
  mean_tokens: float,
  until_s: float,
  factor_I: np.ndarray,
) -> DecodeView:
  """Prices a request at every decode instance.

  Args:
    mean_tokens: of any output, guessed.
    until_s: seconds until the request joins.
    factor_I: online correction of a step's seconds.
  """
  life = min(mean_tokens, max_output_tokens)
  rows_then_I = _rows_then(loads, life, mean_tokens, until_s)
  # Contexts grow by half a life on average: of others, and of the request.
  other_s_I = loads.token_s_I * (life / 2)
  other_s_I += loads.mean_row_s_I
  other_s_I *= rows_then_I
  mean_s_I = loads.token_s_I * (prompt_tokens + life / 2)
  mean_s_I += loads.row_s_I
  mean_s_I += other_s_I
  # No more rows than a batch takes are in a step.
  rows_then_I += ONE
  share_I = loads.batch_I / rows_then_I
  mean_s_I *= np.minimum(share_I, ONE, out=share_I)
  mean_s_I += loads.base_s_I
  mean_s_I *= factor_I
  need = loads.need_tokens(prompt_tokens, max_output_tokens)
  has_room_I = loads.free_tokens_I >= need
  has_room_I &= loads.has_row_I
  return DecodeView(mean_s_I, has_room_I, loads.capacity_tokens_I, need)


def _rows_then(
  loads: DecodeLoads, life: float, mean_tokens: float, until_s: float
) -> np.ndarray:
  """Mean rows beside the request over its life, [I].

  Exponents are kept negative as they are, which saves array calls.
  """
  left_I = np.minimum(loads.mean_left_I, mean_tokens)
  before_I = left_I * loads.step_s_I
  np.divide(-until_s, before_I, out=before_I)
  life_I = -life / left_I
  # Of the rows that decode now, the mean of exp(-k / left) over the life.
  stay_I = np.exp(before_I + life_I)
  stay_I -= np.exp(before_I)
  stay_I /= life_I
  stay_I *= loads.active_I
  # Those still in prefill begin on the way: each is there for its own life.
  np.minimum(before_I, -ONE, out=before_I)
  stay_I -= loads.coming_I / before_I
  return stay_I


def longest_step_s(
  loads: DecodeLoads,
  i: int,
  prompt_tokens: int,
  join_s: float,
  life: float,
  mean_tokens: float,
) -> float:
  """The step that TBT is judged by, at instance i with the request in it.

  TBT is the mean of the longest tenth of the intervals, so the fuller end of
  its life counts: when it joins, or when it leaves.
  """
  rows = max(int(loads.rows_I[i]), 1)
  context = int(loads.context_tokens_I[i]) / rows
  step_s = loads.step[i].exact(rows, int(context * rows))
  stay_s = mean_tokens * step_s
  others = max(
    loads.horizon[i].decoding_at(time_s, stay_s)
    for time_s in (join_s, join_s + life * step_s)
  )
  batch = min(others + 1, int(loads.max_batch_I[i]))
  tokens = (prompt_tokens + others * context) * batch / (others + 1)
  return loads.step[i].exact(batch, int(tokens))


def room_wait_s(
  loads: DecodeLoads, i: int, need_tokens: int, mean_tokens: float
) -> float:
  """Seconds until instance i has room: until enough of its rows ended.

  A share s of rows with r steps left on average ends within -r * log(1 - s)
  steps.
  """
  free = int(loads.capacity_tokens_I[i] - loads.reserved_tokens_I[i])
  short = need_tokens - free + loads.waiting_tokens(i)
  if short <= 0 or not loads.rows_I[i]:
    return 0.0
  rows, tokens = int(loads.rows_I[i]), int(loads.context_tokens_I[i])
  step_s = loads.batch_step_s(i, rows, tokens)
  left = min(max(loads.left_tokens_I[i] / rows, 1.0), mean_tokens)
  share = min(short / max(int(loads.reserved_tokens_I[i]), 1), 0.99)
  return -math.log1p(-share) * left * step_s
