# SPDX-License-Identifier: Apache-2.0
"""Ports: each direction of each link of each instance, shared fairly.

A flow of bytes takes from all ports that it passes at once, so many seconds of
each a byte. Flows of lower `priority` come first: the next class shares what
they leave, and stands still at a port that they fill. Within a class rates are
max-min fair: they rise together until a port is full, those that pass there
stay, the others go on rising (progressive filling; Bertsekas and Gallager, Data
Networks, section 6.5.2). Rates change only where a flow comes or goes, and only
those of flows that share a port with it, directly or through others.

Differs from `transfer/links.py`, which serves whole moves in order: a move that
has begun does not stand still there, and its own class waits behind it.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math

from mooncake_jax.sim.clock import Clock
from mooncake_jax.sim.clock import Due

# What is left of a port, or of a flow, by no more than rounding is nothing.
FULL = 1e-9
LEAST_BYTES = 1e-3


class Port:
  """One direction of one link of an instance.

  Attributes:
    flows: that pass now, with the seconds that a byte of each takes.
    moved_bytes: of all flows that passed, or passed in part.
    used_s: seconds that these bytes take of it.
  """

  __slots__ = ('flows', 'moved_bytes', 'used_s')

  def __init__(self):
    self.flows: dict[Flow, float] = {}
    self.moved_bytes = 0.0
    self.used_s = 0.0

  def leave(self, flow: 'Flow', num_bytes: float) -> None:
    """The flow goes, after `num_bytes`."""
    self.used_s += num_bytes * self.flows.pop(flow)
    self.moved_bytes += num_bytes


class Flow:
  """Bytes on their way, more of which may be added as they flow.

  Attributes:
    uses: the ports that it passes and the seconds a byte takes of each.
    priority: its class; lower ones take of a port before it does.
    left_bytes: as of `since_s`.
    stop_bytes: of them, how many are left at its next stop.
    byte_s: seconds a byte takes at the present rate, inf where others fill a
      port; 0 before it has entered and after it has left.
    flowed_bytes: since it entered.
  """

  __slots__ = (
    'byte_s',
    'due',
    'flowed_bytes',
    'left_bytes',
    'priority',
    'since_s',
    'stop_bytes',
    'uses',
  )

  def __init__(self, uses: tuple[tuple[Port, float], ...], priority: int = 0):
    self.uses = uses
    self.priority = priority
    self.left_bytes = 0.0
    self.stop_bytes = 0.0
    self.flowed_bytes = 0.0
    self.byte_s = 0.0
    self.since_s = 0.0
    self.due: Due | None = None


class Sharing:
  """The rates of all flows."""

  def __init__(self, clock: Clock, stopped: Callable[[Flow], None]):
    """`stopped` is called where a flow has `stop_bytes` left."""
    self._clock = clock
    self._stopped = stopped

  def enter(self, flow: Flow) -> None:
    """It flows from now on."""
    flow.since_s, flow.flowed_bytes = self._clock.now_s, 0.0
    is_alone, slowest_s = True, 0.0
    for port, byte_s in flow.uses:
      if port.flows:
        is_alone = False
      if byte_s > slowest_s:
        slowest_s = byte_s
      port.flows[flow] = byte_s
    if is_alone:
      self._flows_at(flow, slowest_s)
    else:
      self._share(flow)

  def leave(self, flow: Flow) -> None:
    """It stops, whatever is left; others get its share."""
    self._advance(flow)
    if flow.due is not None:
      self._clock.drop(flow.due)
    flow.byte_s, flow.due = 0.0, None
    for port, _ in flow.uses:
      port.leave(flow, flow.flowed_bytes)
    for port, _ in flow.uses:
      for other in port.flows:
        self._share(other)
        break

  def add(self, flow: Flow, num_bytes: float) -> None:
    """More bytes of it, behind those that are left; `restop` comes next."""
    self._advance(flow)
    flow.left_bytes += num_bytes

  def restop(self, flow: Flow) -> None:
    """Its bytes or its next stop have changed."""
    self._advance(flow)
    self._flows_at(flow, flow.byte_s)

  def left_bytes(self, flow: Flow) -> float:
    """Of a flow, now."""
    self._advance(flow)
    return flow.left_bytes

  def _share(self, flow: Flow) -> None:
    """Fair rates of a flow and of all that its rate bears on."""
    for other, byte_s in _fair(_sharers(flow)).items():
      if byte_s != other.byte_s:
        self._advance(other)
        self._flows_at(other, byte_s)

  def _advance(self, flow: Flow) -> None:
    """Counts what flowed up to now."""
    now_s = self._clock.now_s
    if flow.byte_s and now_s > flow.since_s:
      flowed = min((now_s - flow.since_s) / flow.byte_s, flow.left_bytes)
      flow.left_bytes -= flowed
      flow.flowed_bytes += flowed
    flow.since_s = now_s

  def _flows_at(self, flow: Flow, byte_s: float) -> None:
    """It goes on at a rate: its next stop is due then, if it moves at all."""
    flow.byte_s = byte_s
    if flow.due is not None:
      self._clock.drop(flow.due)
      flow.due = None
    num_bytes = flow.left_bytes - flow.stop_bytes
    if byte_s < math.inf:
      seconds = num_bytes * byte_s
      flow.due = self._clock.at(flow.since_s + seconds, self._stop, flow)
    elif num_bytes < LEAST_BYTES:  # it was about to stop when others came
      flow.due = self._clock.at(flow.since_s, self._stop, flow)

  def _stop(self, flow: Flow) -> None:
    flow.due = None
    flow.flowed_bytes += flow.left_bytes - flow.stop_bytes
    flow.left_bytes, flow.since_s = flow.stop_bytes, self._clock.now_s
    self._stopped(flow)


def _sharers(flow: Flow) -> list[Flow]:
  """Those that pass its ports, theirs, and so on; in order of discovery."""
  found, seen = {flow: None}, set[Port]()
  todo = [flow]
  while todo:
    for port, _ in todo.pop().uses:
      if port not in seen:
        seen.add(port)
        todo += [other for other in port.flows if other not in found]
        found |= dict.fromkeys(port.flows)
  return [*found]


def _fair(flows: Sequence[Flow]) -> dict[Flow, float]:
  """Seconds a byte takes of each flow; inf of those that get nothing."""
  rates: dict[Flow, float] = {}
  room: dict[Port, float] = {p: 1.0 for f in flows for p, _ in f.uses}
  for priority in sorted({flow.priority for flow in flows}):
    _fill(priority, room, rates)
  return {flow: 1 / rate if rate else math.inf for flow, rate in rates.items()}


def _fill(
  priority: int, room: dict[Port, float], rates: dict[Flow, float]
) -> None:
  """Adds the rates of one class, by progressive filling of what is left."""
  ports = [*room]
  while True:
    open_s = {port: _open_s(port, priority, rates) for port in ports}
    ports = [port for port in ports if open_s[port]]
    if not ports:
      return
    full = min(ports, key=lambda port: room[port] / open_s[port])
    ports.remove(full)
    rate = room[full] / open_s[full] if room[full] > FULL else 0.0
    for flow in full.flows:
      if flow.priority == priority and flow not in rates:
        rates[flow] = rate
        for port, byte_s in flow.uses:
          room[port] -= rate * byte_s


def _open_s(port: Port, priority: int, rates: dict[Flow, float]) -> float:
  """Seconds that a byte of each of a class takes of the port together."""
  open_s = 0.0
  for flow, byte_s in port.flows.items():
    if flow.priority == priority and flow not in rates:
      open_s += byte_s
  return open_s
