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
  completed = [r for r in records if r.outcome == 'completed']
  ttft_s = np.array([r.ttft_s for r in completed])
  tbt_s = np.array([tbt_tail_s(r) or 0.0 for r in completed])
  in_time_s = tbt_s[ttft_s <= TTFT_S]
  return {
    **flat(outcome.summary.to_dict()),
    'ttft_box': _box(ttft_s),
    'tbt_share': _shares(tbt_s, len(records)),
    'capacity': _shares(in_time_s, len(records)),
    'prefill_s': _mean([r.prefill_s for r in _prefilled(records)]),
    'replicas': replicas.counts,
    'loads': loads(records, outcome.summary.duration_s),
  }


def _prefilled(records: Sequence[RequestRecord]) -> list[RequestRecord]:
  return [r for r in records if r.prefill_done_s is not None]


def _box(ttft_s: np.ndarray) -> list[float]:
  """Quartiles of TTFT, and the upper whisker of a box plot."""
  if not len(ttft_s):
    return []
  q1, q2, q3 = np.percentile(ttft_s, (25, 50, 75)).tolist()
  whisker = ttft_s[ttft_s <= q3 + 1.5 * (q3 - q1)].max().item()
  return [q1, q2, q3, whisker]


def _shares(tbt_s: np.ndarray, num_offered: int) -> dict[str, float]:
  """Of all requests, those of `tbt_s` that are within each limit in ms.

  A request of one token has no TBT and is within all of them.
  """
  return {
    str(ms): int((tbt_s <= ms / 1e3).sum()) / max(num_offered, 1)
    for ms in TBT_MS
  }


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values) if values else 0.0
