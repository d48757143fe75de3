# SPDX-License-Identifier: Apache-2.0
"""Samples for `costs.fit` from what a served run tells of its works.

So costs can be those of serving, where works disturb each other, instead of
works measured alone.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from mooncake_jax.costs.fit import DecodeSample
from mooncake_jax.costs.fit import PrefillSample
from mooncake_jax.events import TokensEmitted
from mooncake_jax.events import WorkDone


class Observed(NamedTuple):
  """What a run's chunks and decode steps took."""

  prefill: list[PrefillSample]
  decode: list[DecodeSample]


def observed(
  events: Iterable[object],
  prompt_tokens: Mapping[str, int],
  decode_instances: Iterable[str],
) -> Observed:
  """Samples of all chunks and of those decode steps whose start is known.

  Args:
    events: of the run, in order; others than works and tokens are passed over.
    prompt_tokens: by request.
    decode_instances: their names; first tokens come from the others.
  """
  events = list(events)
  chunks = [
    PrefillSample(
      work.stop_token - work.start_token,
      work.start_token,
      sum(stop_s - start_s for start_s, stop_s in work.spans),
    )
    for work in events
    if isinstance(work, WorkDone)
    and (work.step, work.status) == ('chunk', 'completed')
    and work.spans
  ]
  tokens = [event for event in events if isinstance(event, TokensEmitted)]
  steps = []
  for name in decode_instances:
    steps += _steps([t for t in tokens if t.instance == name], prompt_tokens)
  return Observed(chunks, steps)


def _steps(
  tokens: Iterable[TokensEmitted], prompt_tokens: Mapping[str, int]
) -> Iterator[DecodeSample]:
  """Steps of one instance; the first of a segment is left out."""
  emitted: dict[str, int] = {}
  before: set[str] = set()
  before_s = 0.0
  # A journal may tell a step row by row.
  for last_s, group in groupby(tokens, lambda e: e.emitted.segment.last_s):
    told = [event.emitted for event in group]
    segment = told[0].segment
    names = {name for emitted in told for name, _ in emitted.tries}
    # A token's context is the prompt, the first token and those before it.
    context = sum(
      prompt_tokens[name] + 1 + emitted.get(name, 0) for name in names
    )
    if segment.count > 1:
      middle = context + len(names) * segment.count // 2
      yield DecodeSample(len(names), middle, segment.mean_interval_s)
    elif names & before and last_s > before_s:
      # A row that goes on was stepped without a pause.
      yield DecodeSample(len(names), context, last_s - before_s)
    for name in names:
      emitted[name] = emitted.get(name, 0) + segment.count
    before, before_s = names, last_s
