# SPDX-License-Identifier: Apache-2.0
"""What a prompt's way to its decode instance consists of, from events.

Of its prefill: computing, bubbles and boundaries between stages
(`costs.pipeline.split`). After it: the KVCache that still has to arrive, which
streaming hides behind the computing.
"""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from mooncake_jax.costs.pipeline import split
from mooncake_jax.costs.pipeline import StageSpan
from mooncake_jax.events import KVArrived
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import WorkDone


class PrefillSplit(NamedTuple):
  """Seconds of one request; bubbles include what others computed meanwhile.

  So do boundaries where its first chunk met others: see `pipeline.split`.
  """

  compute_s: float
  bubble_s: float
  boundary_s: float
  kv_exposed_s: float


def prefill_splits(
  events: Iterable[object],
) -> dict[tuple[str, int], PrefillSplit]:
  """By (request_id, attempt), of those whose KVCache arrived."""
  chunks: Mapping[tuple[str, int], list[WorkDone]] = defaultdict(list)
  done_s: dict[tuple[str, int], float] = {}
  found: dict[tuple[str, int], PrefillSplit] = {}
  for event in events:
    if isinstance(event, WorkDone) and event.step == 'chunk':
      if event.status == 'completed':
        chunks[event.request_id, event.attempt].append(event)
    elif isinstance(event, PrefillDone):
      done_s[event.request_id, event.attempt] = event.time_s
    elif isinstance(event, KVArrived):
      key = event.request_id, event.attempt
      if key in done_s and key not in found:  # its first prefill
        exposed_s = max(event.time_s - done_s[key], 0.0)
        found[key] = _of(chunks[key], exposed_s)
  return found


def mean_split(events: Iterable[object]) -> dict[str, float]:
  """Means over the requests, by field; nothing where there are none."""
  splits = [*prefill_splits(events).values()]
  if not splits:
    return {}
  return dict(zip(PrefillSplit._fields, map(fmean, zip(*splits))))


def stage_spans(chunks: Sequence[WorkDone]) -> list[StageSpan]:
  """Chunks of one request, in prompt order, on their stages."""
  ordered = sorted(chunks, key=lambda chunk: chunk.start_token)
  return [
    StageSpan(c, s, *span)
    for c, chunk in enumerate(ordered)
    for s, span in enumerate(chunk.spans)
  ]


def _of(chunks: Sequence[WorkDone], exposed_s: float) -> PrefillSplit:
  parts = split(stage_spans(chunks))
  return PrefillSplit(
    parts.compute_s, parts.bubble_s, parts.boundary_s, exposed_s
  )
