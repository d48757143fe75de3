# SPDX-License-Identifier: Apache-2.0
"""How each event changes the view.

An event says more than itself: tokens imply that prefill ended, and the end of
a prefill that its instance begins the next one. So a lost event is made good
by the next.
"""

from mooncake_jax.conductor.joining import tbt_in_steps
from mooncake_jax.conductor.placed import Placed
from mooncake_jax.conductor.view import View
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceDraining
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory
from mooncake_jax.events import Preempted
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import TokensEmitted
from mooncake_jax.metrics.latency import tail_s
from mooncake_jax.request import TokenSegment


def observe(view: View, event: Event) -> None:
  """Updates the view; an event of an unknown try is ignored."""
  match event:
    case RequestEvent():
      placed = view.placed.get(event.request_id, event.attempt)
      if placed is not None:
        _observe_request(view, placed, event)
    case TokensEmitted():
      _observe_tokens(view, event)
    case BlocksStored() | BlocksEvicted() | Inventory():
      view.index.observe(event)
    case InstanceDraining():
      view.close(event.instance)
    case InstanceLost():
      view.index.observe(event)
      view.close(event.instance)
    case InstanceJoined():
      view.join(event.instance, event.role)


def _observe_request(view: View, placed: Placed, event: RequestEvent) -> None:
  match event:
    case Preempted():
      placed.preempted, placed.last_token_s = True, None
      view.decode.preempt(event.request_id)
    case PrefixFetched() | PrefillDone() if placed.preempted:
      pass
    case PrefixFetched():
      _fetched(view, placed, event)
    case PrefillDone():
      _learn_prefill(view, placed, event)
      _prefilled(view, placed, event.time_s)
    case Finished() | Failed() | Cancelled() | RejectedLate():
      if isinstance(event, Finished):
        view.lengths.add(
          event.num_output_tokens, placed.request.max_output_tokens
        )
        _learn_duration(view, placed, event.time_s)
        _learn_tbt(view, placed)
      view.release(placed, event.time_s)


def _observe_tokens(view: View, event: TokensEmitted) -> None:
  segment, decode = event.emitted.segment, view.decode
  gaps_s: list[float] = []
  tries: list[str] = []
  begun: list[Placed] = []
  for request_id, attempt in event.emitted.tries:
    placed = view.placed.get(request_id, attempt)
    if placed is None:
      continue
    tries.append(request_id)
    if placed.last_token_s is not None:
      gaps_s.append(segment.first_s - placed.last_token_s)
    if placed.first_token_s is None:
      begun.append(placed)
    _emitted(view, placed, segment)
  if not tries:
    return
  observed_s = segment.mean_interval_s
  if segment.count == 1:
    # A row that has just joined waited for more than a step.
    observed_s = min(gaps_s, default=0.0)
  _learn_step(view, event.instance, observed_s)
  decode.grow(event.instance, tries, segment.count)
  for placed in begun:
    placed.join_tbt_s = _join_tbt_s(view, placed)


def _emitted(view: View, placed: Placed, segment: TokenSegment) -> None:
  if placed.first_token_s is None:
    placed.first_token_s = segment.first_s
    _prefilled(view, placed, segment.first_s)
  placed.last_token_s = segment.last_s
  if not placed.preempted:
    placed.segments.append(segment)


def _prefilled(view: View, placed: Placed, time_s: float) -> None:
  """Its prefill ended then; the next of the queue began."""
  if placed.prefilled:
    return
  placed.prefilled = True
  name, at = placed.request.request_id, placed.placement
  view.lateness.observe(at.ttft_s, time_s - placed.placed_s)
  view.prefill.done(at.prefill, name, time_s)
  view.horizon.expect(name, time_s)
  view.decode.begins(name, time_s)
  view.unexpect(placed)


def _fetched(view: View, placed: Placed, event: PrefixFetched) -> None:
  at, placed.transfers = placed.placement, ()
  placed.fetched_s = event.time_s
  taken_s = event.time_s - event.started_s
  view.transfer_error.observe(
    view.prefill.row[at.prefill], view.fetch_alone_s(at), taken_s
  )


def _learn_prefill(view: View, placed: Placed, event: PrefillDone) -> None:
  """Compute as planned tells of the instance's speed; any, of its queue's.

  A first chunk that waited for layers of its prefix tells of no speed.
  """
  at, request = placed.placement, placed.request
  i, taken_s = view.prefill.row[at.prefill], event.time_s - event.started_s
  model_s = at.prefill_s / placed.prefill_factor
  view.queue_error.observe(model_s * view.pace_error.factor_I.item(i), taken_s)
  planned = request.num_prompt_tokens - (
    at.reused_blocks * view.layout.block_size_tokens
  )
  if event.computed_tokens == planned:
    if placed.fetched_s <= event.started_s:
      view.prefill_error.observe(i, model_s, taken_s)
    view.pace_error.observe(i, model_s, taken_s)


def _learn_step(view: View, decode: str, observed_s: float) -> None:
  """Tokens one after another, against a step of what decodes there now."""
  loads, i = view.decode, view.decode.row[decode]
  rows, tokens = loads.active_rows_I.item(i), loads.active_tokens_I.item(i)
  if observed_s > 0 and 0 < rows <= loads.max_batch_I[i]:
    view.step_error.observe(i, loads.step[i].exact(rows, tokens), observed_s)


def _join_tbt_s(view: View, placed: Placed) -> float:
  """Its TBT in the batch that it joins."""
  loads, i = view.decode, view.decode.row[placed.placement.decode]
  rows, tokens = loads.active_rows_I.item(i), loads.active_tokens_I.item(i)
  step_s = loads.batch_step_s(i, rows, tokens)
  step_s *= view.step_error.factor_I.item(i)
  return step_s * tbt_in_steps(view, placed.request, step_s, rows - 1)


def _learn_tbt(view: View, placed: Placed) -> None:
  observed_s = tail_s(placed.segments)
  if observed_s is not None and not placed.preempted:
    model_s = placed.placement.tbt_s / placed.tbt_factor
    view.tbt_odds.observe(model_s, observed_s)
    view.join_odds.observe(placed.join_tbt_s, observed_s)


def _learn_duration(view: View, placed: Placed, time_s: float) -> None:
  if placed.first_token_s is not None and time_s > placed.first_token_s:
    view.durations.add(time_s - placed.first_token_s)
