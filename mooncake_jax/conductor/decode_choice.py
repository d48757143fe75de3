# SPDX-License-Identifier: Apache-2.0
"""Where to decode: SelectDecodingInstance, by TBT over the expected life.

The request joins its batch when its prefill ends and stays for as many steps
as it is expected to emit tokens. Meanwhile contexts grow by a token a step and
rows end: of n rows that have r steps left on average n * exp(-k / r) are there
after k steps. The mean step over that life decides among the instances that
have room and a row for the request; where none has, the wait for both does.
`meet` looks closer at one instance: request by request, who will be there.
"""

from collections.abc import Iterator
import math
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor.arrays import ONE
from mooncake_jax.conductor.arrays import pick
from mooncake_jax.conductor.decode_load import DecodeLoads
from mooncake_jax.conductor.decode_rows import Batch
from mooncake_jax.conductor.output_lengths import OutputLengths
from mooncake_jax.request import Request


class DecodeChoice(NamedTuple):
  """A decode instance for a request.

  Attributes:
    tbt_s: of the request, see `tail`; a wait for a row is its first interval.
    wait_s: until there is room for it; its prefill is held back so long.
  """

  row: int
  tbt_s: float
  wait_s: float


class Wait(NamedTuple):
  """Of a request behind all that are placed at an instance.

  Attributes:
    room_s: until there is KVCache room for it.
    row_s: until there is a row for it too.
  """

  room_s: float
  row_s: float


class DecodeView(NamedTuple):
  """What each instance would be with the request in it, [I].

  Attributes:
    mean_step_s_I: over the request's life.
    has_room_I: whether it could join at once.
    capacity_tokens_I: room if nobody else were there.
    need_tokens: the request's, to begin with.
    whole_tokens: and in the end.
  """

  mean_step_s_I: np.ndarray
  has_room_I: np.ndarray
  capacity_tokens_I: np.ndarray
  need_tokens: int
  whole_tokens: int

  @property
  def fits_I(self) -> np.ndarray:
    """Whether it could ever join."""
    return self.capacity_tokens_I >= self.whole_tokens

  def waits(
    self,
    loads: DecodeLoads,
    until_stop: float,
    alone_s: float,
    factor_I: np.ndarray,
  ) -> Iterator[Wait]:
    """Of each instance."""
    for i, factor in enumerate(factor_I.tolist()):
      if self.has_room_I.item(i):
        yield Wait(0.0, 0.0)
      else:
        need = self.need_tokens
        yield wait_for(loads, i, need, until_stop, alone_s, factor)


def choose_decode(
  loads: DecodeLoads,
  request: Request,
  able_I: np.ndarray,
  lengths: OutputLengths,
  until_s: float,
  alone_s: float,
  factor_I: np.ndarray,
  number: int,
) -> DecodeChoice | None:
  """The instance of least mean step; None where the request never fits.

  Args:
    able_I: which of them may be taken.
    until_s: seconds from now until the request joins.
    alone_s: what of that it takes by itself, which holds room already.
    number: of equally good ones it takes this one, round and round.
  """
  prompt, most = request.num_prompt_tokens, request.max_output_tokens
  view = decode_view(loads, prompt, most, lengths, until_s, factor_I)
  wait = Wait(0.0, 0.0)
  room_I = able_I & view.has_room_I
  if np.count_nonzero(room_I):
    i = pick(view.mean_step_s_I, room_I, number)
  elif np.count_nonzero(fits_I := able_I & view.fits_I):
    waits = [*view.waits(loads, lengths.until_stop, alone_s, factor_I)]
    i = pick(np.array([w.row_s for w in waits]), fits_I, number)
    wait = waits[i]
  else:
    return None
  step_s, others = view.mean_step_s_I.item(i), loads.rows_I.item(i)
  late = max(wait.row_s - max(wait.room_s, until_s), 0.0) / step_s
  tbt_s = step_s * tail(lengths.expected(most), others, late)
  return DecodeChoice(i, tbt_s, wait.room_s)


def decode_view(
  loads: DecodeLoads,
  prompt_tokens: int,
  max_output_tokens: int,
  lengths: OutputLengths,
  until_s: float,
  factor_I: np.ndarray,
) -> DecodeView:
  """Prices a request at every decode instance.

  Args:
    until_s: seconds until the request joins.
    factor_I: online correction of a step's seconds.
  """
  life = lengths.expected(max_output_tokens)
  rows_then_I = _rows_then(loads, life, lengths.until_stop, until_s)
  # Contexts grow by half a life on average: of others, and of the request.
  other_s_I = loads.token_s_I * (life / 2)
  other_s_I += loads.mean_row_s_I
  other_s_I *= rows_then_I
  mean_s_I = loads.token_s_I * (prompt_tokens + life / 2)
  mean_s_I += loads.row_s_I
  mean_s_I += other_s_I
  # No more rows than a batch takes are in a step.
  rows_then_I += ONE
  if rows_then_I.item(rows_then_I.argmax()) > loads.least_batch:
    share_I = loads.batch_I / rows_then_I
    mean_s_I *= np.minimum(share_I, ONE, out=share_I)
  mean_s_I += loads.base_s_I
  mean_s_I *= factor_I
  need = loads.need_tokens(prompt_tokens, max_output_tokens)
  has_room_I = loads.free_tokens_I >= need
  has_room_I &= loads.has_row_I
  whole = loads.whole_tokens(prompt_tokens, max_output_tokens)
  return DecodeView(mean_s_I, has_room_I, loads.capacity_tokens_I, need, whole)


def _rows_then(
  loads: DecodeLoads, life: float, until_stop: float, until_s: float
) -> np.ndarray:
  """Mean rows beside the request over its life, [I].

  Exponents are kept negative as they are, which saves array calls.
  """
  left_I = np.minimum(loads.mean_left_I, until_stop)
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


def meet(
  loads: DecodeLoads,
  i: int,
  prompt_tokens: int,
  now_s: float,
  join_s: float,
  until_stop: float,
) -> tuple[float, Batch]:
  """The step at instance i when the request joins, and who is in it besides.

  When those who decode now end, goes with how long steps take until then:
  halfway between one of now and the one that is asked for.
  """
  rows, tokens = loads.active_rows_I.item(i), loads.active_tokens_I.item(i)
  now_step_s = loads.batch_step_s(i, max(rows, 1), max(tokens, prompt_tokens))
  step_s = now_step_s
  for _ in range(2):
    mean_s = (now_step_s + step_s) / 2
    others = loads.requests[i].at(join_s, now_s, mean_s, until_stop)
    tokens = int(others.context_tokens) + prompt_tokens
    step_s = loads.batch_step_s(i, 1 + round(others.rows), tokens)
  return step_s, others


def tail(num_tokens: float, others: float = 1.0, late: float = 0.0) -> float:
  """A request's TBT in steps: the mean of its longest tenth of intervals.

  See `metrics.latency`. All are a step but the first, as whoever joins `others`
  waits for the step under way, half of one on average, once its KVCache has
  arrived and there is a row for it, `late` steps after its first token.
  """
  longest = max(math.ceil((num_tokens - 1) / 10), 1)
  return (longest + 0.5 * min(others, 1.0) + late) / longest


def wait_for(
  loads: DecodeLoads,
  i: int,
  need_tokens: int,
  until_stop: float,
  alone_s: float,
  factor: float,
) -> Wait:
  """Until instance i has `need_tokens` of room, and a row besides.

  Whoever ends is followed by others, so that room comes free at a steady rate:
  all that is held is given back once in the time of a prefill and an output.

  Args:
    alone_s: of a prefill, which holds room already.
    factor: online correction of a step's seconds.
  """
  placed = loads.rows_I.item(i)
  if not placed:
    return Wait(0.0, 0.0)
  held = max(placed - loads.num_waiting(i), 1)
  tokens = loads.context_tokens_I.item(i) * held // placed
  step_s = factor * loads.batch_step_s(i, held, tokens)
  short = need_tokens - loads.free_tokens_I.item(i) + loads.waiting_tokens(i)
  share = min(loads.batch_I.item(i) / held, 1.0)
  freed_tokens = share * max(loads.reserved_tokens_I.item(i), 1)
  life_s = alone_s + step_s * _output_steps(loads, i, until_stop)
  room_s = max(short, 0) / freed_tokens * life_s
  row_s = step_s * row_wait(loads, i, placed, until_stop)
  return Wait(room_s, max(room_s, row_s))


def row_wait(
  loads: DecodeLoads, i: int, others: int, until_stop: float
) -> float:
  """Steps until a request behind `others` has a row at instance i.

  In the steps of an output a full batch ends once.
  """
  batch = loads.max_batch_I.item(i)
  over = others + 1 - batch
  if over <= 0:
    return 0.0
  return over / batch * _output_steps(loads, i, until_stop)


def _output_steps(loads: DecodeLoads, i: int, until_stop: float) -> float:
  """Steps of an output at instance i: rows that decode have half of one left
  on average, the others all of it."""
  rows = loads.rows_I.item(i)
  begun = min(loads.active_rows_I.item(i), loads.max_batch_I.item(i))
  whole = loads.left_tokens_I.item(i) / max(rows - begun / 2, 1.0)
  return min(max(whole, 1.0), until_stop)
