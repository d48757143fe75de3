# SPDX-License-Identifier: Apache-2.0
"""What lies between an event and the belief: it may come late, or never.

For studies of a Conductor that is badly informed. Late and lost events only
make beliefs older: queues run down by themselves, reservations expire, a plan
on blocks that are gone is recomputed, and what a later event implies (tokens
say that prefill ended) is taken from it. A store event that is lost holds up
its segment's next ones for seconds (`event_order.py`), then the segment's
inventory is asked for (`Conductor.doubtful`).
"""

from collections import deque
from dataclasses import dataclass
import random

from mooncake_jax.events import Event
from mooncake_jax.events import FleetEvent


@dataclass(frozen=True)
class Telemetry:
  """How badly the Conductor is informed.

  Attributes:
    delay_s: between an event and its belief.
    loss: share of events that are never heard of; those that say which
      instances there are always are.
    seed: of the losses.
  """

  delay_s: float = 0.0
  loss: float = 0.0
  seed: int = 0

  def __post_init__(self):
    if not self.delay_s >= 0:
      raise ValueError(f'Telemetry.delay_s={self.delay_s!r} must be >= 0')
    if not 0 <= self.loss < 1:
      raise ValueError(f'Telemetry.loss={self.loss!r} must be in [0, 1)')


class EventLine:
  """Events under way to the beliefs, in the order they happened."""

  def __init__(self, telemetry: Telemetry):
    self._loss, self._delay_s = telemetry.loss, telemetry.delay_s
    self._rng = random.Random(telemetry.seed)
    self._events: deque[Event] = deque()

  def send(self, event: Event) -> None:
    loss = self._loss
    if not loss or self._rng.random() >= loss or isinstance(event, FleetEvent):
      self._events.append(event)

  def take(self) -> Event:
    """The next; only where one `has_arrived`."""
    return self._events.popleft()

  def has_arrived(self, now_s: float) -> bool:
    """Whether anything new is known by now."""
    events = self._events
    return bool(events) and events[0].time_s + self._delay_s <= now_s
