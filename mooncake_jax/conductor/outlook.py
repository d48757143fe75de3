# SPDX-License-Identifier: Apache-2.0
"""What admission goes by, out of the view; see `admission.Outlook`."""

from collections.abc import Collection
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mooncake_jax.conductor.admission import Outlook
from mooncake_jax.conductor.decode_choice import meet
from mooncake_jax.conductor.decode_choice import row_wait
from mooncake_jax.conductor.decode_choice import tail
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Placement
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO

# What of an outlook takes long, and who reads which part of it.
ALL = frozenset({'now', 'then', 'closely'})
READS: Mapping[object, Collection[str]] = {
  'none': (),
  'load': (),
  'early_rejection': ('now',),
  'early_rejection_predicted': ('then',),
  'slo_predictive': ('closely',),
}


def of(
  view: View,
  rules: ConductorSpec,
  slo: SLO,
  request: Request,
  planned: Placement,
  now_s: float,
) -> Outlook:
  """What is predicted for a planned request: all, but for an admission that is
  known to read less."""
  reads = READS.get(rules.admission, ALL)
  i = view.decode.row[planned.decode]
  now = then = planned.tbt_s
  if 'now' in reads:
    now = _tbt_now_s(view, i, request)
  if 'then' in reads:
    then = _tbt_then_s(view, rules, request, now_s + planned.ttft_s)
  seen = Outlook(
    planned.ttft_s * view.lateness.margin,
    planned.tbt_s,
    now,
    then,
    share=rules.share_of(request),
  )
  if 'closely' not in reads:
    return seen
  return _closely(view, slo, request, seen, planned, now_s)


def judged_tbt_s(rules: ConductorSpec, seen: Outlook) -> float:
  """The TBT that this admission goes by."""
  match rules.admission:
    case 'early_rejection':
      return seen.tbt_now_s
    case 'early_rejection_predicted':
      return seen.tbt_then_s
  return seen.tbt_s


def retry_after_s(
  view: View, planned: Placement, reason: str, seen: Outlook, slo: SLO
) -> float | None:
  """When a refused request may be taken.

  Too long a queue runs down a second a second; a prompt whose transfer and
  compute alone miss the SLO never keeps it. Too full a batch empties as
  outputs end, within about a mean output of steps.
  """
  if reason == 'ttft':
    alone_s = planned.transfer_s + planned.prefill_s
    limit_s = seen.share * slo.ttft_s
    return None if alone_s > limit_s else seen.ttft_s - limit_s
  return view.lengths.mean * planned.tbt_s


def _closely(
  view: View,
  slo: SLO,
  request: Request,
  seen: Outlook,
  planned: Placement,
  now_s: float,
) -> Outlook:
  """With the request's TBT and its odds from who will decode beside it.

  Predicted steps are off by a share that is learnt (`corrections.Odds`).
  """
  loads, lengths = view.decode, view.lengths
  i, prompt_tokens = loads.row[planned.decode], request.num_prompt_tokens
  join_s, most = now_s + planned.ttft_s, request.max_output_tokens
  step_s, others = meet(
    loads, i, prompt_tokens, now_s, join_s, lengths.until_stop
  )
  factor = view.step_error.factor_I.item(i) * view.tbt_odds.factor
  step_s *= factor
  wait = row_wait(loads, i, loads.rows_I.item(i), lengths.until_stop)
  late = max(
    view.late_kv_s(request, planned) / step_s, wait - planned.ttft_s / step_s
  )
  in_steps = tail(lengths.expected(most), others.rows, late)
  keeps = view.tbt_odds.keeps(seen.share * slo.tbt_s / in_steps, step_s)
  return replace(
    seen,
    tbt_s=step_s * in_steps,
    keeps=float(keeps) if most > 1 else 1.0,
  )


def _tbt_now_s(view: View, i: int, request: Request) -> float:
  """A step of what decodes at instance i now, and the request; where there is
  no row for it, with its share of the wait for one."""
  loads, lengths = view.decode, view.lengths
  others = loads.active_rows_I.item(i)
  tokens = loads.active_tokens_I.item(i) + request.num_prompt_tokens
  late = row_wait(loads, i, others, lengths.until_stop)
  in_steps = tail(lengths.expected(request.max_output_tokens), 0, late)
  return in_steps * loads.batch_step_s(i, others + 1, tokens)


def _tbt_then_s(
  view: View, rules: ConductorSpec, request: Request, then_s: float
) -> float:
  """Mean step of the decode instances at `then_s` (arXiv section 7.4).

  System level: so many requests decode then, of a mean context each, spread
  evenly; each decodes for the same time. Those beyond all batches wait for a
  row.
  """
  loads = view.decode
  duration_s = rules.decode_duration_s or view.durations.mean
  rows = view.horizon.decoding_at(then_s, duration_s) + 1
  placed = max(int(loads.rows_I.sum()), 1)
  tokens = rows * int(loads.context_tokens_I.sum()) / placed
  share_I = loads.accepts_I / max(int(loads.accepts_I.sum()), 1)
  rows_I = np.minimum(rows * share_I, loads.max_batch_I)
  step_s_I = loads.base_s_I + loads.row_s_I * rows_I
  step_s_I += loads.token_s_I * tokens * share_I
  batch = float(loads.max_batch_I @ loads.accepts_I)
  late = max(rows / max(batch, 1.0) - 1, 0.0) * view.lengths.mean
  in_steps = tail(view.lengths.expected(request.max_output_tokens), 0, late)
  return in_steps * float((view.step_error.factor_I * step_s_I) @ share_I)
