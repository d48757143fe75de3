# SPDX-License-Identifier: Apache-2.0
"""One decision, a pure function of view and request.

As in FAST'25 Algorithm 1: the best prefill instance (lines 4-20), the decode
instance (21), the SLO (22) and the source of the prefix (24). What a plan
takes is predicted alike for all policies: queue, the part of the transfer that
nothing hides, compute.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mooncake_jax.conductor import outlook
from mooncake_jax.conductor.arrays import pick
from mooncake_jax.conductor.asking import draw
from mooncake_jax.conductor.asking import question
from mooncake_jax.conductor.decode_choice import choose_decode
from mooncake_jax.conductor.question import best_plan
from mooncake_jax.conductor.question import least_score
from mooncake_jax.conductor.spec import ConductorSpec
from mooncake_jax.conductor.view import View
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.slo import SLO


class Try(NamedTuple):
  """One try of a request.

  Attributes:
    attempt: counts its tries, from 0.
    avoid: instances that failed it; taken only where there are no others.
  """

  request: Request
  attempt: int = 0
  avoid: frozenset[str] = frozenset()


def decide(
  view: View, rules: ConductorSpec, slo: SLO, asked: Try, now_s: float
) -> Placement | Rejection:
  """Where a request goes, or why not; changes nothing."""
  planned = plan(view, rules, asked, now_s)
  if planned is None:
    return Rejection(asked.request.request_id, 'no_instance', 0.0, 0.0)
  seen = outlook.of(view, rules, slo, asked.request, planned, now_s)
  reason = rules.admits(seen, slo)
  if not reason and seen.tbt_s == planned.tbt_s:
    return planned
  if not reason:
    return replace(planned, tbt_s=seen.tbt_s)
  return Rejection(
    asked.request.request_id,
    reason,
    planned.ttft_s,
    outlook.judged_tbt_s(rules, seen),
    outlook.retry_after_s(view, planned, reason, seen, slo),
  )


def plan(
  view: View, rules: ConductorSpec, asked: Try, now_s: float
) -> Placement | None:
  """Where a request would go if it is let in; None if nobody can take it."""
  request, prefill = asked.request, view.prefill
  number = draw(rules, request, asked.attempt)
  decodes_I = able(view.decode.names, view.decode.accepts_I, asked.avoid)
  able_I = able(prefill.names, prefill.accepts_I, asked.avoid)
  able_I = view.with_partner(able_I, decodes_I)
  if not np.count_nonzero(able_I):
    return None
  ask = question(view, rules, request, now_s, able_I)
  plans = rules.plans(ask)
  i = pick(least_score(plans), able_I, number)
  best = best_plan(plans, i)
  fetch_blocks, found = best.fetch_blocks(i), ask.price(best).at(i)
  decode = choose_decode(
    view.decode,
    request,
    view.only_partner(prefill.names[i], decodes_I),
    view.lengths,
    found.ttft_s,
    found.transfer_s + found.prefill_s,
    view.step_error.factor_I,
    number >> 20,
  )
  if decode is None:
    return None
  local_blocks = ask.local_blocks_I.item(i)
  return Placement(
    request.request_id,
    asked.attempt,
    prefill.names[i],
    view.decode.names[decode.row],
    local_blocks,
    fetch_blocks,
    prefill.names[best.source] if fetch_blocks else None,
    max(found.queue_s, decode.wait_s),
    found.transfer_s,
    found.prefill_s,
    decode.tbt_s,
    found.fetch_s,
    max(ask.remote_blocks - local_blocks - fetch_blocks, 0),
    ask.ssd_blocks_I.item(i),
    ask.device_blocks_I.item(i),
  )


def able(
  names: list[str], accepts_I: np.ndarray, avoid: frozenset[str]
) -> np.ndarray:
  """Who takes requests, those to be avoided only where there is no other."""
  if not avoid:
    return accepts_I
  others_I = accepts_I & [name not in avoid for name in names]
  return others_I if others_I.any() else accepts_I
