# SPDX-License-Identifier: Apache-2.0
"""Why a request goes where it goes: the table a decision was taken from.

Asked on demand and computed then; a decision itself keeps nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields

from mooncake_jax.conductor.asking import question
from mooncake_jax.conductor.decide import decide
from mooncake_jax.conductor.decide import Try
from mooncake_jax.conductor.decode_choice import decode_view
from mooncake_jax.conductor.question import best_plan
from mooncake_jax.conductor.question import least_score
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.slo import SLO

FAILED_BEFORE = 'failed an earlier try'


@dataclass(frozen=True)
class PrefillCandidate:
  """What the policy planned for one prefill instance.

  Attributes:
    device_blocks, host_blocks, ssd_blocks: of its own prefix, by tier; host
      counts blocks that are still expected there.
    fetch_blocks: from `fetch_from`.
    store_blocks: from the store that no instance owns.
    queue_s, transfer_s, prefill_s: predicted terms of TTFT.
    score: what the policy goes by; the least wins.
    verdict: 'chosen', or why not.
  """

  instance: str
  device_blocks: int
  host_blocks: int
  ssd_blocks: int
  fetch_blocks: int
  fetch_from: str
  store_blocks: int
  queue_s: float
  transfer_s: float
  prefill_s: float
  ttft_s: float
  score: float
  verdict: str


@dataclass(frozen=True)
class DecodeCandidate:
  """What a decode instance would be with the request in it.

  Attributes:
    rows, context_tokens: placed there already.
    free_tokens: of its KVCache room.
    mean_step_s: over the request's expected life.
    verdict: 'chosen', or why not.
  """

  instance: str
  rows: int
  context_tokens: int
  free_tokens: int
  mean_step_s: float
  verdict: str


@dataclass(frozen=True)
class Explanation:
  """A decision, and all that it was taken from.

  `str` of it is the decision and two tables.
  """

  decision: Placement | Rejection
  prefill: tuple[PrefillCandidate, ...]
  decode: tuple[DecodeCandidate, ...]

  def __str__(self) -> str:
    parts = [str(self.decision), _table(self.prefill), _table(self.decode)]
    return '\n\n'.join(parts)


def explain(
  view: View, rules: ConductorSpec, slo: SLO, asked: Try, now_s: float
) -> Explanation:
  """What would be decided now, and why; changes nothing."""
  decision = decide(view, rules, slo, asked, now_s)
  return Explanation(
    decision,
    tuple(_prefill(view, rules, asked, now_s, decision)),
    tuple(_decode(view, asked, decision)),
  )


def _prefill(
  view: View,
  rules: ConductorSpec,
  asked: Try,
  now_s: float,
  decision: Placement | Rejection,
) -> Iterator[PrefillCandidate]:
  ask = question(view, rules, asked.request, now_s, view.prefill.accepts_I)
  plans = [plan._replace(found=ask.price(plan)) for plan in rules.plans(ask)]
  local_I, score_I = ask.local_blocks_I, least_score(plans)
  least = ask.least(score_I)
  for i, name in enumerate(view.prefill.names):
    best = best_plan(plans, i)
    fetch_blocks, terms = best.fetch_blocks(i), ask.price(best).at(i)
    score = float(score_I[i])
    better = 'closed' if not view.prefill.accepts_I[i] else 'drawn against'
    if view.prefill.accepts_I[i] and name in asked.avoid:
      better = FAILED_BEFORE
    elif view.prefill.accepts_I[i] and score > least:
      better = f'{score - least:.4g} worse'
    yield PrefillCandidate(
      name,
      int(ask.device_blocks_I[i]),
      int(local_I[i] - ask.device_blocks_I[i] - ask.ssd_blocks_I[i]),
      int(ask.ssd_blocks_I[i]),
      fetch_blocks,
      view.prefill.names[best.source] if fetch_blocks else '',
      max(ask.remote_blocks - int(local_I[i]) - fetch_blocks, 0),
      terms.queue_s,
      terms.transfer_s,
      terms.prefill_s,
      terms.ttft_s,
      score,
      _verdict(decision, 'prefill', name, better),
    )


def _decode(
  view: View, asked: Try, decision: Placement | Rejection
) -> Iterator[DecodeCandidate]:
  loads, request = view.decode, asked.request
  seen = decode_view(
    loads,
    request.num_prompt_tokens,
    request.max_output_tokens,
    view.lengths,
    decision.ttft_s,
    view.step_error.factor_I,
  )
  fits_I = seen.fits_I
  for i, name in enumerate(loads.names):
    why = 'slower' if seen.has_room_I[i] else 'no room now'
    why = why if fits_I[i] else 'never fits'
    why = FAILED_BEFORE if name in asked.avoid else why
    why = why if loads.accepts_I[i] else 'closed'
    yield DecodeCandidate(
      name,
      int(loads.rows_I[i]),
      int(loads.context_tokens_I[i]),
      int(loads.free_tokens_I[i]),
      float(seen.mean_step_s_I[i]),
      _verdict(decision, 'decode', name, why),
    )


def _verdict(
  decision: Placement | Rejection, role: str, name: str, why_not: str
) -> str:
  if isinstance(decision, Placement) and getattr(decision, role) == name:
    return 'chosen'
  return why_not


def _table(rows) -> str:
  """Columns of the rows' fields, numbers to four digits."""
  if not rows:
    return ''
  names = [field.name for field in fields(rows[0])]
  cells = [names, *([_cell(getattr(r, n)) for n in names] for r in rows)]
  widths = [max(map(len, column)) for column in zip(*cells)]
  return '\n'.join(
    '  '.join(cell.rjust(width) for cell, width in zip(line, widths))
    for line in cells
  )


def _cell(value: object) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)
