# SPDX-License-Identifier: Apache-2.0
"""How well a request's latency was predicted, term by term.

TTFT from placement on is queue + transfer + prefill, as predicted and as
observed. Observed are only when the first chunk began and the last one ended;
the time before is queue up to when the instance ended the prefill before it,
and transfer, which nothing hid, from then on.
"""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.request import RequestRecord

TERMS = ('queue', 'transfer', 'prefill', 'ttft', 'tbt')


class Prediction(NamedTuple):
  """One term of one request, in seconds."""

  term: str
  predicted_s: float
  observed_s: float


def predictions(records: Sequence[RequestRecord]) -> list[Prediction]:
  """Every term of every request that was placed and prefilled."""
  free_s = _free_before(records)
  found = []
  for record in records:
    placed_s, start_s = record.placed_s, record.prefill_start_s
    done_s = record.prefill_done_s
    if placed_s is None or start_s is None or done_s is None:
      continue
    if start_s < placed_s:
      continue  # of another try: the last one's prefill did not end
    queue_s = min(max(free_s[record.request_id] - placed_s, 0.0), start_s)
    observed = (
      ('queue', record.predicted_queue_s, queue_s),
      ('transfer', record.predicted_transfer_s, start_s - placed_s - queue_s),
      ('prefill', record.predicted_prefill_s, done_s - start_s),
      ('ttft', record.predicted_ttft_s, done_s - placed_s),
      ('tbt', record.predicted_tbt_s, tbt_tail_s(record)),
    )
    found += [
      Prediction(term, predicted_s, observed_s)
      for term, predicted_s, observed_s in observed
      if predicted_s is not None and observed_s is not None
    ]
  return found


def prediction_errors(
  records: Sequence[RequestRecord],
) -> dict[str, dict[str, float]]:
  """By term: mean error (predicted less observed), P50 and P99 of its size."""
  errors_s: dict[str, list[float]] = defaultdict(list)
  for term, predicted_s, observed_s in predictions(records):
    errors_s[term].append(predicted_s - observed_s)
  return {term: _figures(errors_s[term]) for term in TERMS if errors_s[term]}


def _figures(errors_s: list[float]) -> dict[str, float]:
  p50_s, p99_s = np.percentile(np.abs(errors_s), (50, 99)).tolist()
  return {'bias_s': float(np.mean(errors_s)), 'p50_s': p50_s, 'p99_s': p99_s}


def _free_before(records: Iterable[RequestRecord]) -> dict[str, float]:
  """When each request's instance ended the prefill before its own."""
  starts: dict[str | None, list[tuple[float, float, str]]] = defaultdict(list)
  for r in records:
    if r.prefill_start_s is not None and r.prefill_done_s is not None:
      starts[r.prefill].append(
        (r.prefill_start_s, r.prefill_done_s, r.request_id)
      )
  free_s: dict[str, float] = {}
  for entries in starts.values():
    before_s = 0.0
    for start_s, done_s, name in sorted(entries):
      free_s[name] = min(before_s, start_s)
      before_s = max(before_s, done_s)
  return free_s
