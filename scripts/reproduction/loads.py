# SPDX-License-Identifier: Apache-2.0
"""Load of the prefill and of the decode pool over a run, and how they swing."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_jax.request import RequestRecord

WINDOW_S = 15.0  # as the samples of arXiv figure 9


def loads(
  records: Sequence[RequestRecord], duration_s: float
) -> dict[str, Any]:
  """Mean requests in prefill and in decode in each 15 s while they come.

  In prefill: from arrival to the last chunk's end, queue included. In decode:
  from the first token to the last. `swing` is a pool's standard deviation over
  its mean; `lag0` and `lag30` are the correlation of the decode pool with the
  prefill pool at the same time and 30 s before.
  """
  last_s = max((record.arrival_s for record in records), default=0.0)
  edges = np.arange(0.0, min(last_s, duration_s) + WINDOW_S, WINDOW_S)
  prefill = _mean_present(
    [
      (r.arrival_s, r.prefill_done_s)
      for r in records
      if r.prefill_done_s is not None
    ],
    edges,
  )
  decode = _mean_present(
    [
      (r.first_token_s, r.finished_s)
      for r in records
      if r.first_token_s is not None and r.finished_s is not None
    ],
    edges,
  )
  return {
    'prefill': [round(x, 2) for x in prefill.tolist()],
    'decode': [round(x, 2) for x in decode.tolist()],
    'prefill_swing': _swing(prefill),
    'decode_swing': _swing(decode),
    'lag0': _correlation(prefill, decode),
    'lag30': _correlation(prefill[:-2], decode[2:]),
  }


def _mean_present(
  spans: Sequence[tuple[float, float]], edges: np.ndarray
) -> np.ndarray:
  """How many spans there are, on average between two edges."""
  if not spans:
    return np.zeros(len(edges) - 1)
  start, stop = np.array(spans).T
  passed = [
    np.clip(edge - start, 0.0, stop - start).sum().item() for edge in edges
  ]
  return np.diff(passed) / WINDOW_S


def _swing(load: np.ndarray) -> float:
  return float(load.std() / load.mean()) if load.any() else 0.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
  if len(a) < 3 or not a.std() or not b.std():
    return 0.0
  return float(np.corrcoef(a, b)[0, 1])
