# SPDX-License-Identifier: Apache-2.0
"""Every figure of a run, from its records.

As in FAST'25 section 5.1. Differs: what was asked for, let in, refused, spoilt
and finished are counted apart, so that dropping requests can't pass for
serving them.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
from typing import Any

import numpy as np

from mooncake_jax.backend import LinkUse
from mooncake_jax.metrics.latency import intervals
from mooncake_jax.metrics.latency import longest_gap_s
from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.latency import tpot_s
from mooncake_jax.metrics.links import link_figures
from mooncake_jax.metrics.predictions import prediction_errors
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO

# mean, p50, p90 and p99 over requests; None where there was none.
Statistics = dict[str, float | None]


@dataclass(frozen=True)
class Summary:
  """What a run did; the names are those of `summary.json`.

  Attributes:
    offered: requests that came = rejected + accepted + those that could not
      be served at all (failed before a placement), or still wait for one.
    accepted: placed by the Conductor, whatever became of them.
    rejected: refused before any work.
    rejected_late: accepted, but refused after prefill.
    completed: all of their output came.
    failed, cancelled: of those offered.
    effective: completed within both limits of the SLO. A request of one
      output token has no TBT and keeps that limit.
    effective_request_capacity: effective / offered; every rejection, failure
      and late answer counts against it.
    ttft_attainment, tbt_attainment: the same for one limit alone; at least
      the one for both.
    effective_per_s: effective / duration_s.
    effective_per_s_per_instance: that for each instance, a pair that shares
      devices being one; None where nobody said how many there are.
    hit_rate: prompt tokens not computed / prompt tokens, both summed over the
      requests whose prefill ended (those rejected late included). None where
      no prefill ended or the workload does not say what prompts share (a trace
      without hashes).
    hit_rate_by_tier: its parts by the tier that held them; their sum.
    hit_rate_request_mean: mean of these requests' own ratios.
    ttft_s: arrival to first token, of completed requests.
    tbt_tail_s: mean of a request's longest 10 % of token intervals, of
      completed requests with at least two tokens.
    tbt_s: of all token intervals of completed requests, whosever they are.
    tpot_s: the mean of a request's intervals.
    longest_gap_s: the longest of a request's intervals.
    prediction_errors: of the Conductor's predictions, by term (queue,
      transfer, prefill, ttft from placement on, tbt): `bias_s` is the mean of
      predicted less observed, `p50_s` and `p99_s` are of its size.
    rejection_reasons: how many were rejected, early or late, by reason.
    output_tokens: of completed requests.
    output_tokens_per_s: these over duration_s.
    preemptions: how often requests lost their decode pages and resumed.
    recomputed_tokens: prompt and output tokens computed again, for that or by
      another try.
    wasted_prefill_s: prefill seconds of requests that were not completed
      (and no longer run), all their tries together.
    link_bytes, link_utilisation: see `metrics.links.LinkFigures`; empty where
      nobody counted.
    duration_s: of the run, from 0 to the last thing that happened.
    slo_ttft_s, slo_tbt_s: the limits `effective` was counted with.
  """

  offered: int
  accepted: int
  rejected: int
  rejected_late: int
  completed: int
  failed: int
  cancelled: int
  effective: int
  effective_request_capacity: float
  ttft_attainment: float
  tbt_attainment: float
  effective_per_s: float
  effective_per_s_per_instance: float | None
  hit_rate: float | None
  hit_rate_by_tier: dict[str, float]
  hit_rate_request_mean: float | None
  ttft_s: Statistics
  tbt_tail_s: Statistics
  tbt_s: Statistics
  tpot_s: Statistics
  longest_gap_s: Statistics
  prediction_errors: dict[str, dict[str, float]]
  rejection_reasons: dict[str, int]
  output_tokens: int
  output_tokens_per_s: float
  preemptions: int
  recomputed_tokens: int
  wasted_prefill_s: float
  link_bytes: dict[str, int]
  link_utilisation: dict[str, dict[str, float]]
  duration_s: float
  slo_ttft_s: float
  slo_tbt_s: float

  def to_dict(self) -> dict[str, Any]:
    """Plain dicts and numbers, ready for JSON."""
    return asdict(self)

  @classmethod
  def from_dict(cls, figures: Mapping[str, Any]) -> 'Summary':
    """What `to_dict` gave.

    Raises:
      ValueError: naming the figures that are missing or unknown.
    """
    names = {field.name for field in fields(cls)}
    if names != set(figures):
      raise ValueError(
        f'Summary: missing={sorted(names - set(figures))} '
        f'unknown={sorted(set(figures) - names)}'
      )
    return cls(**figures)


def summarize(
  records: Sequence[RequestRecord],
  slo: SLO,
  duration_s: float | None = None,
  instances: int | None = None,
  links: Mapping[tuple[str, str], LinkUse] | None = None,
) -> Summary:
  """Counts and averages the records of a run.

  Args:
    slo: what makes a request effective.
    duration_s: of the run; None is up to the last time stamp in the records.
    instances: that served it; None is unknown.
    links: what they carried, see `Backend.link_uses`; None is unknown.
  """
  outcomes = Counter(record.outcome for record in records)
  completed = [r for r in records if r.outcome == 'completed']
  tails_s = [tbt_tail_s(record) for record in completed]
  kept = [slo.kept(r.ttft_s, tbt_s) for r, tbt_s in zip(completed, tails_s)]
  effective = sum(ttft and tbt for ttft, tbt in kept)
  if duration_s is None:
    duration_s = max((_last_s(record) for record in records), default=0.0)
  effective_per_s = _ratio(effective, duration_s)
  output_tokens = sum(record.num_output_tokens for record in completed)
  return Summary(
    offered=len(records),
    accepted=sum(record.placed_s is not None for record in records),
    rejected=outcomes['rejected'],
    rejected_late=outcomes['rejected_late'],
    completed=len(completed),
    failed=outcomes['failed'],
    cancelled=outcomes['cancelled'],
    effective=effective,
    effective_request_capacity=_ratio(effective, len(records)),
    ttft_attainment=_ratio(sum(ttft for ttft, _ in kept), len(records)),
    tbt_attainment=_ratio(sum(tbt for _, tbt in kept), len(records)),
    effective_per_s=effective_per_s,
    effective_per_s_per_instance=(
      None if instances is None else effective_per_s / instances
    ),
    **_hits([r for r in records if r.prefill_done_s is not None]),
    ttft_s=statistics([r.ttft_s for r in completed]),
    tbt_tail_s=statistics(tails_s),
    tbt_s=_interval_statistics(completed),
    tpot_s=statistics([tpot_s(r) for r in completed]),
    longest_gap_s=statistics([longest_gap_s(r) for r in completed]),
    prediction_errors=prediction_errors(records),
    rejection_reasons=_rejection_reasons(records),
    output_tokens=output_tokens,
    output_tokens_per_s=_ratio(output_tokens, duration_s),
    preemptions=sum(record.preemptions for record in records),
    recomputed_tokens=sum(record.recomputed_tokens for record in records),
    wasted_prefill_s=sum(
      r.prefill_s for r in records if r.outcome not in ('completed', 'running')
    ),
    **link_figures(links or {}, duration_s)._asdict(),
    duration_s=duration_s,
    slo_ttft_s=slo.ttft_s,
    slo_tbt_s=slo.tbt_s,
  )


def is_effective(record: RequestRecord, slo: SLO) -> bool:
  """Completed, and both limits kept."""
  if record.outcome != 'completed':
    return False
  return all(slo.kept(record.ttft_s, tbt_tail_s(record)))


def statistics(values: Sequence[float | None]) -> Statistics:
  """Mean and percentiles of the values that are there."""
  known = [value for value in values if value is not None]
  if not known:
    return dict.fromkeys(('mean', 'p50', 'p90', 'p99'))
  p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
  return {'mean': float(np.mean(known)), 'p50': p50, 'p90': p90, 'p99': p99}


def _interval_statistics(records: Sequence[RequestRecord]) -> Statistics:
  """Of all token intervals, counted as often as they passed."""
  found = [intervals(record.segments) for record in records]
  seconds = np.concatenate([np.empty(0), *[each.seconds for each in found]])
  counts = np.concatenate([np.empty(0), *[each.counts for each in found]])
  if not len(seconds):
    return statistics([])
  mean = float(np.average(seconds, weights=counts))
  percentiles = np.percentile(
    seconds, (50, 90, 99), weights=counts, method='inverted_cdf'
  ).tolist()
  return dict(zip(('mean', 'p50', 'p90', 'p99'), (mean, *percentiles)))


def _hits(prefilled: Sequence[RequestRecord]) -> dict[str, Any]:
  """The three hit rates of requests whose prefill ended."""
  known = [record for record in prefilled if record.reuse_known]
  if not known:
    return {
      'hit_rate': None,
      'hit_rate_by_tier': {},
      'hit_rate_request_mean': None,
    }
  prompt_tokens = sum(record.prompt_tokens for record in known)
  reused: Counter[str] = Counter()
  ratios = []
  for record in known:
    tokens = sum(record.reused_tokens.values())
    assert tokens <= record.prompt_tokens, f'{record=}'
    reused.update(record.reused_tokens)
    ratios.append(tokens / record.prompt_tokens)
  return {
    'hit_rate': _ratio(reused.total(), prompt_tokens),
    'hit_rate_by_tier': {
      tier: tokens / prompt_tokens for tier, tokens in sorted(reused.items())
    },
    'hit_rate_request_mean': _ratio(sum(ratios), len(ratios)),
  }


def _rejection_reasons(records: Sequence[RequestRecord]) -> dict[str, int]:
  reasons = Counter(
    record.reason
    for record in records
    if record.outcome in ('rejected', 'rejected_late')
  )
  return dict(reasons.most_common())


def _last_s(record: RequestRecord) -> float:
  """When the last thing happened to a request."""
  last_s = record.finished_s
  if last_s is not None:
    return last_s
  return record.segments[-1].last_s if record.segments else record.arrival_s


def _ratio(part: float, whole: float) -> float:
  return part / whole if whole else 0.0
