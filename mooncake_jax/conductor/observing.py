# SPDX-License-Identifier: Apache-2.0
"""How each event changes the view.

An event says more than itself: tokens imply that prefill ended, and the end of
a prefill that its instance begins the next one. So a lost event is made good
by the next.
"""

from mooncake_jax.conductor.placed import Placed
from mooncake_jax.conductor.view import View
from mooncake_jax.events import BlocksEvicted
from mooncake_jax.events import BlocksStored
from mooncake_jax.events import Cancelled
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import Finished
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.events import Inventory
from mooncake_jax.events import PrefillDone
from mooncake_jax.events import PrefixFetched
from mooncake_jax.events import RejectedLate
from mooncake_jax.events import RequestEvent
from mooncake_jax.events import TokensEmitted
from mooncake_jax.metrics.latency import tail_s


def observe(view: View, event: Event) -> None:
  """Updates the view; an event of an unknown try is ignored."""
  match event:
    case BlocksStored() | BlocksEvicted() | Inventory():
      view.index.observe(event)
    case InstanceLost():
      view.index.observe(event)
      view.close(event.instance)
    case InstanceJoined():
      view.join(event.instance, event.role)
    case RequestEvent():
      placed = view.placed.get(event.request_id, event.attempt)
      if placed is not None:
        _observe_request(view, placed, event)


def _observe_request(view: View, placed: Placed, event: RequestEvent) -> None:
  match event:
    case PrefixFetched():
      _fetched(view, placed, event)
    case PrefillDone():
      _learn_prefill(view, placed, event)
      _prefilled(view, placed, event.time_s)
    case TokensEmitted():
      _prefilled(view, placed, event.segment.first_s)
      placed.segments.append(event.segment)
      view.decode.grow(event.request_id, event.segment.count)
    case Finished() | Failed() | Cancelled() | RejectedLate():
      if isinstance(event, Finished):
        _learn_decode(view, placed, event)
      view.release(placed, event.time_s)


def _prefilled(view: View, placed: Placed, time_s: float) -> None:
  """Its prefill ended then; the next of the queue began."""
  if placed.prefilled:
    return
  placed.prefilled = True
  name, at = placed.request.request_id, placed.placement
  view.prefill.done(at.prefill, name, time_s)
  view.horizon.expect(name, time_s)


def _fetched(view: View, placed: Placed, event: PrefixFetched) -> None:
  at = placed.placement
  if at.fetch_s > 0:
    view.transfer_error.observe(
      view.prefill.row[at.prefill],
      at.fetch_s,
      placed.transfer_factor,
      event.time_s - event.started_s,
    )


def _learn_prefill(view: View, placed: Placed, event: PrefillDone) -> None:
  """Learns from it what was computed as planned; less or more tells nothing."""
  at, request = placed.placement, placed.request
  planned = request.num_prompt_tokens - (
    at.reused_blocks * view.layout.block_size_tokens
  )
  if event.computed_tokens == planned:
    view.prefill_error.observe(
      view.prefill.row[at.prefill],
      at.prefill_s,
      placed.prefill_factor,
      event.time_s - event.started_s,
    )


def _learn_decode(view: View, placed: Placed, event: Finished) -> None:
  view.lengths.add(event.num_output_tokens)
  if placed.segments:
    first_s = placed.segments[0].first_s
    view.durations.add(max(event.time_s - first_s, 1e-6))
  observed_s = tail_s(placed.segments)
  if observed_s is not None:
    view.tbt_error.observe(
      view.decode.row[placed.placement.decode],
      placed.placement.tbt_s,
      placed.tbt_factor,
      observed_s,
    )
