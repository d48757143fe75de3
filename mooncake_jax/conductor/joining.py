# SPDX-License-Identifier: Apache-2.0
"""The decode instance's double check: may a prefilled request join its batch?

By then who decodes beside it is known, so that this sees what no prediction
at arrival could (arXiv section 7.2 has it as the local scheduler's). With
'slo_predictive' it weighs how likely the request keeps its TBT against how
many others it would make miss theirs; else it looks at the request alone.
"""

import numpy as np

from mooncake_jax.conductor.decode_choice import row_wait
from mooncake_jax.conductor.decode_choice import tail
from mooncake_jax.conductor.decode_rows import DecodeRows
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO

# Of keeping the limit; who has less would only be in the way of others.
LEAST_ODDS = 0.1
# The same where it waits for a row, which one that comes later could have had.
SURE_ODDS = 0.9


def may_join(
  view: View,
  rules: ConductorSpec,
  slo: SLO,
  request: Request,
  instance: str,
  num_rows: int,
  context_tokens: int,
) -> bool:
  """Whether the SLO says so.

  Args:
    instance: to decode at.
    num_rows, context_tokens: of its batch with the request in it.
  """
  loads = view.decode
  i = loads.row[instance]
  step_s = loads.batch_step_s(i, num_rows, context_tokens)
  in_steps = tbt_in_steps(view, request, step_s, num_rows - 1)
  alone = request.max_output_tokens == 1  # it has no interval
  if rules.admission != 'slo_predictive':
    return alone or step_s * in_steps <= slo.tbt_s
  odds = view.join_odds
  factor = view.step_error.factor_I.item(i) * odds.factor
  added_s = loads.row_s_I.item(i)
  added_s += loads.token_s_I.item(i) * request.num_prompt_tokens
  limit_s = rules.share_of(request) * slo.tbt_s / in_steps
  keeps = 1.0 if alone else odds.keeps(limit_s, factor * step_s)
  rows = loads.requests[i]
  limit_s_R = slo.tbt_s / rows.tail_R
  spoils_R = odds.keeps(limit_s_R, factor * (step_s - added_s))
  spoils_R -= odds.keeps(limit_s_R, factor * step_s)
  waits = num_rows > loads.max_batch_I.item(i)
  least = SURE_ODDS if waits else LEAST_ODDS
  return float(keeps) >= max(float(_counts(rows) @ spoils_R), least)


def tbt_in_steps(
  view: View, request: Request, step_s: float, others: int
) -> float:
  """What a placed request's TBT will be, in steps of about `step_s`."""
  placed, lengths = view.placed.of(request.request_id), view.lengths
  late = 0.0
  if placed is not None:
    i = view.decode.row[placed.placement.decode]
    late = view.late_kv_s(request, placed.placement) / step_s
    late = max(late, row_wait(view.decode, i, others, lengths.until_stop))
  return tail(lengths.expected(request.max_output_tokens), others, late)


def _counts(rows: DecodeRows) -> np.ndarray:
  """How far the TBT of those that decode is still open, [R] in 0 to 1.

  A tenth of the intervals counts, and those past do not change any more.
  """
  return np.where(rows.left_R < rows.most_R, rows.left_R / rows.most_R, 0.0)
