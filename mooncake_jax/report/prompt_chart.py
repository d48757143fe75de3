# SPDX-License-Identifier: Apache-2.0
"""One prompt's chunks on their stages and its transfers, as bars over time."""

from collections.abc import Iterable
from collections.abc import Sequence

from mooncake_jax.events import WorkDone
from mooncake_jax.metrics.prefill_split import stage_spans
from mooncake_jax.report.gantt import Bar

STEPS = ('fetch', 'put', 'handoff')
TRANSFERS = 7  # the colour of all transfers: grey


def longest_prompt(works: Iterable[WorkDone]) -> list[WorkDone]:
  """Works of the try with the most chunks; none where nothing was computed."""
  by_key: dict[tuple[str, int], list[WorkDone]] = {}
  for work in works:
    by_key.setdefault((work.request_id, work.attempt), []).append(work)
  return max(by_key.values(), key=_num_chunks, default=[])


def prompt_bars(works: Sequence[WorkDone]) -> list[Bar]:
  """Rows of stages, a colour a chunk, then of transfers by kind; from 0."""
  chunks = [w for w in works if w.step == 'chunk' and w.spans]
  begin_s = min((w.started_s for w in works), default=0.0)
  bars = [
    Bar(
      f'stage {span.stage}',
      span.start_s - begin_s,
      span.stop_s - begin_s,
      span.chunk % TRANSFERS,
      str(span.chunk),
    )
    for span in sorted(stage_spans(chunks), key=lambda s: (s.stage, s.start_s))
  ]
  for step in STEPS:
    bars += [
      Bar(step, w.started_s - begin_s, w.time_s - begin_s, TRANSFERS)
      for w in works
      if w.step == step
    ]
  return bars


def _num_chunks(works: Sequence[WorkDone]) -> int:
  return sum(work.step == 'chunk' for work in works)
