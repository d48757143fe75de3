# SPDX-License-Identifier: Apache-2.0
"""What a Master should hold, kept naively: one flat dict of replicas.

It knows nothing of heaps, links or byte counters; it is told of each call and
its answer, and says whether the answer was allowed.
"""

from dataclasses import dataclass
from dataclasses import field

from mooncake_jax.backend import Replica
from mooncake_jax.blocks.segments import MEDIA
from mooncake_jax.blocks.segments import owner
from mooncake_jax.store.objects import Medium
from mooncake_jax.store.outcomes import CopyTask


@dataclass
class Held:
  """A replica: open since a time, or readable, or leaving at a time."""

  size: int
  since: float
  tenant: str | None = None
  open: bool = True
  leaves: float | None = None
  condemned: bool = False

  @property
  def readable(self) -> bool:
    return not self.open and self.leaves is None


@dataclass
class Model:
  lease_s: float
  timeout_s: float
  # name -> (capacity, medium, lower)
  places: dict[str, tuple[int, Medium, str | None]] = field(
    default_factory=dict
  )
  live: dict[Replica, Held] = field(default_factory=dict)
  leases: dict[bytes, float] = field(default_factory=dict)
  pins: dict[bytes, float] = field(default_factory=dict)
  quotas: dict[str, int] = field(default_factory=dict)
  draining: set[str] = field(default_factory=set)
  tasks: dict[Replica, CopyTask] = field(default_factory=dict)  # by destination
  now: float = 0.0

  def of(self, key: bytes) -> list[Replica]:
    return [r for r in self.live if r.key == key]

  def readable(self, key: bytes) -> set[Replica]:
    return {r for r in self.of(key) if self.live[r].readable}

  def has(self, group: str, key: bytes) -> bool:
    return any(owner(r.segment) == group for r in self.readable(key))

  def here(self, key: bytes, place: str) -> Replica | None:
    return next((r for r in self.of(key) if r.segment == place), None)

  def used(self, place: str) -> int:
    return sum(h.size for r, h in self.live.items() if r.segment == place)

  def charged(self, tenant: str) -> int:
    return sum(h.size for h in self.live.values() if h.tenant == tenant)

  def leased(self, key: bytes) -> bool:
    return self.leases.get(key, -1.0) >= self.now

  def kept(self, key: bytes) -> set[Replica]:
    """Those of a medium that lets nothing go by itself."""
    places = self.places
    return {r for r in self.readable(key) if places[r.segment][1] != 'remote'}

  def being_written(self, key: bytes) -> bool:
    return any(self.live[r].open for r in self.of(key))

  def may_go(self, replica: Replica) -> bool:
    """Whether a put may evict it, soft pins apart."""
    held, key = self.live[replica], replica.key
    lower = self.places[replica.segment][2]
    return (
      held.readable
      and not self.leased(key)
      and not self.being_written(key)
      and self.pins.get(key, -1.0) != float('inf')
      and (lower is None or held.condemned or len(self.kept(key)) > 1)
    )

  def soft(self, key: bytes) -> bool:
    return self.pins.get(key, -1.0) >= self.now

  def evict(self, evicted, place: str, keep, tenant=None) -> None:
    """Replicas that went from `place` for a put; some were open too long."""
    went_soft = False
    for key, replica, _ in evicted:
      assert replica.key == key and replica.segment == place
      if self.live[replica].open:
        assert self.now - self.live[replica].since > self.timeout_s
        self.end(replica)
        continue
      assert self.may_go(replica), (replica, self.now)
      assert key not in keep
      went_soft |= self.soft(key)
      self.end(replica)
    if went_soft:
      left = [r for r in self.live if r.segment == place and self.may_go(r)]
      if tenant in self.quotas:  # it may have gone for the quota alone
        left = [r for r in left if self.live[r].tenant == tenant]
      assert all(self.soft(r.key) or r.key in keep for r in left), left

  def end(self, replica: Replica) -> None:
    del self.live[replica]
    if not self.of(replica.key):
      self.leases.pop(replica.key, None)
      self.pins.pop(replica.key, None)
    task = self.tasks.pop(replica, None)
    if task is not None and task.kind == 'offload' and task.src in self.live:
      self.live[task.src].condemned = True

  def open(self, replica, size, tenant) -> None:
    assert self.here(replica.key, replica.segment) is None
    assert replica not in self.live and replica.segment not in self.draining
    self.live[replica] = Held(size, self.now, tenant)
    assert self.used(replica.segment) <= self.places[replica.segment][0]

  def best(self, key: bytes, own: str, far: bool) -> set[tuple[int, int]]:
    """(medium, distance) of the readable replicas, the best alone."""

    def rank(replica: Replica) -> tuple[int, int]:
      medium = MEDIA.index(self.places[replica.segment][1])
      near = replica.segment.split('/')[0] == own
      return medium, 0 if replica.segment == own else 1 if near else 2

    ranks = {rank(r) for r in self.readable(key)}
    remote = MEDIA.index('remote')
    allowed = (r for r in ranks if far or r[1] < 2 or r[0] == remote)
    return {min(allowed, default=(9, 9))}

  def at(self, place: str) -> list[Replica]:
    live = self.live.items()
    return [r for r, h in live if r.segment == place and h.readable]

  def cut_off(self, place: str) -> None:
    """Nobody offloads to it any more."""
    for above, (capacity, medium, lower) in self.places.items():
      if lower == place:
        self.places[above] = (capacity, medium, None)

  def keep_only(self, places) -> None:
    """Segments that left are empty and gone."""
    for place in set(self.places) - set(places):
      assert self.used(place) == 0
      self.draining.discard(place)
      del self.places[place]

  def pin_longer(self, keys, pin: str, soft_s: float) -> None:
    soft_until = self.now + soft_s
    until = {'none': -1.0, 'soft': soft_until, 'hard': float('inf')}[pin]
    for key in keys:
      self.pins[key] = max(self.pins.get(key, -1.0), until)
