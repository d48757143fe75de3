# SPDX-License-Identifier: Apache-2.0
"""Whether to take a request: functions of one signature (arXiv section 7).

A reason to refuse, or ''. The load of a pool is a predicted latency over its
SLO. Prefill load is the request's own predicted TTFT; decode load is read

  load: not at all on arrival, but again after prefill, when it may be too late
  early_rejection: at once, from what decodes now, though the request will
    decode only after its prefill (which makes both loads swing in turn)
  early_rejection_predicted: for the time when that prefill would end
  slo_predictive: by what is predicted of the request itself, request by
    request; refuses what would miss its SLO as good as surely. Whether it may
    decode is settled after prefill, when it is known who does (`joining.py`)
"""

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_jax.slo import SLO


@dataclass(frozen=True)
class Outlook:
  """What is predicted for a request that asks to be let in.

  Attributes:
    ttft_s: of the request, as it is kept nine times in ten.
    tbt_s: of the request.
    tbt_now_s: of that instance's step with the request and what decodes now.
    tbt_then_s: mean of all decode instances when its prefill ends.
    keeps: how likely its TBT keeps the limit.
    share: of the limits, what its priority may use up.
  """

  ttft_s: float
  tbt_s: float
  tbt_now_s: float
  tbt_then_s: float
  keeps: float = 1.0
  share: float = 1.0


# Of keeping the limit on TBT; who has less is taken to miss it. Small, as a
# prefill for nothing costs less than an answer that was never tried.
LEAST_ODDS = 0.01

Admission = Callable[[Outlook, SLO], str]


def none(outlook: Outlook, slo: SLO) -> str:
  """Takes all."""
  return ''


def load(outlook: Outlook, slo: SLO) -> str:
  """By the load of each stage as it begins: the paper's baseline."""
  return 'ttft' if outlook.ttft_s > slo.ttft_s else ''


def early_rejection(outlook: Outlook, slo: SLO) -> str:
  """Algorithm 1, line 22, with decode as it is now."""
  return _refuse(outlook.ttft_s, outlook.tbt_now_s, slo)


def early_rejection_predicted(outlook: Outlook, slo: SLO) -> str:
  """With decode as it will be, on average, when the prefill ends."""
  return _refuse(outlook.ttft_s, outlook.tbt_then_s, slo)


def slo_predictive(outlook: Outlook, slo: SLO) -> str:
  """What would miss its SLO; lower priorities leave room for others."""
  if outlook.ttft_s > outlook.share * slo.ttft_s:
    return 'ttft'
  return 'tbt' if outlook.keeps < LEAST_ODDS else ''


ADMISSIONS: dict[str, Admission] = {
  'none': none,
  'load': load,
  'early_rejection': early_rejection,
  'early_rejection_predicted': early_rejection_predicted,
  'slo_predictive': slo_predictive,
}


def _refuse(ttft_s: float, tbt_s: float, slo: SLO) -> str:
  if ttft_s > slo.ttft_s:
    return 'ttft'
  return 'tbt' if tbt_s > slo.tbt_s else ''
