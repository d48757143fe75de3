# SPDX-License-Identifier: Apache-2.0
"""What is kept of a run: its summary, and what the papers' figures show."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_jax.metrics.latency import tbt_tail_s
from mooncake_jax.metrics.table import flat
from mooncake_jax.request import RequestRecord
from scripts.reproduction.loads import loads
from scripts.reproduction.replicas import Replicas
from scripts.serving import Outcome

TTFT_S = 30.0
TBT_MS = (50, 80, 100, 150, 200, 300, 500, 1000)


def measure(outcome: Outcome, replicas: Replicas) -> dict[str, Any]:
  """Figures by name, ready for JSON."""
  records = outcome.records
  return {
    **flat(outcome.summary.to_dict()),
    'ttft_box': _box(records),
    'tbt_share': _shares(records, None),
    'capacity': _shares(records, TTFT_S),
    'prefill_s': _mean([r.prefill_s for r in _prefilled(records)]),
    'replicas': replicas.counts,
    'loads': loads(records, outcome.summary.duration_s),
  }


def _prefilled(records: Sequence[RequestRecord]) -> list[RequestRecord]:
  return [r for r in records if r.prefill_done_s is not None]


def _box(records: Sequence[RequestRecord]) -> list[float]:
  """Quartiles of TTFT, and the upper whisker of a box plot."""
  found = np.array([r.ttft_s for r in records if r.ttft_s is not None])
  if not len(found):
    return []
  q1, q2, q3 = np.percentile(found, (25, 50, 75)).tolist()
  whisker = found[found <= q3 + 1.5 * (q3 - q1)].max().item()
  return [q1, q2, q3, whisker]


def _shares(
  records: Sequence[RequestRecord], ttft_s: float | None
) -> dict[str, float]:
  """Of all requests, those that completed within a TBT in ms (and a TTFT)."""
  kept = [
    tbt_tail_s(r) or 0.0
    for r in records
    if r.outcome == 'completed'
    and (ttft_s is None or (r.ttft_s or 0.0) <= ttft_s)
  ]
  tbt_s = np.array(kept)
  share = {
    str(ms): int((tbt_s <= ms / 1e3).sum()) / max(len(records), 1)
    for ms in TBT_MS
  }
  return share


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else 0.0
