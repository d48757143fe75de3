# SPDX-License-Identifier: Apache-2.0
"""What a server did of late, and how its cluster is now: to be shown."""

from collections import OrderedDict
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

from mooncake_jax.backend import LinkUse
from mooncake_jax.cluster import Cluster
from mooncake_jax.gateway.choice import Choice
from mooncake_jax.gateway.status import life
from mooncake_jax.metrics.finite import finite
from mooncake_jax.request import Placement
from mooncake_jax.request import RequestRecord
from mooncake_jax.serve import Decision
from mooncake_jax.store.statistics import SegmentUse


class InstanceState(NamedTuple):
  """An instance now.

  Attributes:
    queued: requests that wait for its prefill; 0 of a decode instance.
    rows: that a decode instance steps.
    free_pages: of its device memory.
  """

  name: str
  role: str
  queued: int
  rows: int
  free_pages: int


@dataclass(frozen=True)
class Snapshot:
  """A cluster as it is now; the counts are since its start.

  Attributes:
    hits: blocks read, by medium.
    misses: blocks asked for that nobody had.
    links: by kind and instance.
  """

  instances: tuple[InstanceState, ...]
  segments: tuple[SegmentUse, ...]
  hits: dict[str, int]
  misses: int
  links: dict[tuple[str, str], LinkUse]


def snapshot(cluster: Cluster) -> Snapshot:
  """Looked up in the loop's thread, see `Driver.ask`."""
  statistics = cluster.master.statistics()
  prefill = [
    InstanceState(p.name, 'prefill', len(p.queue), 0, p.pool.num_free)
    for p in cluster.prefill.values()
  ]
  decode = [
    InstanceState(d.name, 'decode', 0, len(d.runs), d.pool.num_free)
    for d in cluster.decode.values()
  ]
  return Snapshot(
    (*prefill, *decode),
    statistics.segments,
    dict(statistics.counts.hits),
    statistics.counts.misses,
    dict(cluster.backend.link_uses()),
  )


@dataclass
class Seen:
  """A request of late.

  Attributes:
    owner: the tenant's name.
    decision: the last one about it.
    record: once it has ended; without its tokens and their times.
    life: of that, see `status.life`.
  """

  request_id: str
  owner: str
  decision: Decision | None = None
  record: RequestRecord | None = None
  life: dict[str, Any] | None = None


class Recent:
  """The last requests, oldest first; a `driver.Watcher`."""

  def __init__(self, most: int):
    self._most = most
    self._seen: OrderedDict[str, Seen] = OrderedDict()

  def decided(self, choice: Choice, decision: Decision) -> None:
    self._of(choice).decision = decision

  def ended(self, choice: Choice, record: RequestRecord) -> None:
    seen = self._of(choice)
    seen.life = life(record, record.finished_s or 0.0)
    record.output_tokens.clear()  # nobody's text is kept
    record.segments.clear()  # a hundred bytes a token
    seen.record = record

  def all(self) -> list[Seen]:
    return [*self._seen.values()]

  def of_call(self, call_id: str) -> list[Seen]:
    """A client's request, or one of its answers."""
    return [
      seen
      for name, seen in self._seen.items()
      if name == call_id or name.rpartition('-')[0] == call_id
    ]

  def _of(self, choice: Choice) -> Seen:
    name = choice.request.request_id
    seen = self._seen.get(name)
    if seen is None:
      seen = self._seen[name] = Seen(name, choice.owner)
      if len(self._seen) > self._most:
        self._seen.popitem(last=False)
    return seen


def explained(seen: Seen, with_fleet: bool = True) -> dict[str, Any]:
  """Why a request went where it went, as plain JSON values.

  Args:
    with_fleet: also how busy all others were: that tells of other tenants.
  """
  decision, record = seen.decision, seen.record
  found: dict[str, Any] = {'request_id': seen.request_id}
  if decision is not None:
    is_placed = isinstance(decision.decision, Placement)
    found['decision'] = 'placed' if is_placed else 'rejected'
    found['attempt'] = decision.attempt
    found['decided_s'] = decision.now_s
    found['predicted'] = asdict(decision.decision)
    found['avoided'] = list(decision.avoid)
    if decision.why is not None and with_fleet:
      found['candidates'] = {
        'prefill': [asdict(each) for each in decision.why.prefill],
        'decode': [asdict(each) for each in decision.why.decode],
      }
  if record is not None:
    found['outcome'], found['reason'] = record.outcome, record.reason
    found['ttft_s'] = record.ttft_s
    found['first_token_s'] = record.first_token_s
    found['reused_tokens'] = record.reused_tokens
  return finite(found)
