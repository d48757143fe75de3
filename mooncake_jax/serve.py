# SPDX-License-Identifier: Apache-2.0
"""The one loop: requests in, records out, on devices or in simulation.

The life of a request:

  1 it arrives; the Conductor places it (or rejects it, 429)
  2 it queues at its prefill instance; the leases on its prefix are taken
  3 decode pages are reserved, prefill pages held, the prefix is fetched
  4 its uncached rest is prefilled in chunks; each chunk's KVCache goes to the
    store and, layer range by layer range, to the decode instance
  5 the last chunk gives the first token; TTFT ends here
  6 when all KVCache has arrived it joins the decode batch
  7 it leaves at a stop token or its length; its pages are free again

Everything that decides runs here, in one thread; only `Backend.wait` waits.
"""

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
import heapq
import itertools

from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.events import Event
from mooncake_jax.metrics.records import RecordBook
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord


@dataclass(frozen=True)
class Decision:
  """The Conductor was asked about a request at `now_s`."""

  now_s: float
  request_id: str
  decision: Placement | Rejection


# What the Conductor was told and asked, in order: enough to replay it.
Journal = list[Decision | Event]
# Called with each finished record; may give the session's next request.
FollowUp = Callable[[RequestRecord], Request | None]


def serve(
  requests: Iterable[Request],
  conductor: Conductor,
  cluster: Cluster,
  follow_up: FollowUp | None = None,
  on_event: Callable[[Event], None] | None = None,
) -> tuple[list[RequestRecord], Journal]:
  """Serves all requests to their ends.

  Args:
    requests: in any order; each is taken at its arrival_s.
    conductor: places them; sees every event.
    cluster: serves them.
    follow_up: see `FollowUp`; closes the loop of a conversation.
    on_event: called with each event, as it happens.

  Returns:
    One record a request, in order of arrival, and the journal.
  """
  order = itertools.count()
  arrivals = [(r.arrival_s, next(order), r) for r in requests]
  heapq.heapify(arrivals)
  book, journal = RecordBook(), []

  def hear(events: list[Event]) -> None:
    for event in events:
      conductor.observe(event)
      journal.append(event)
      if on_event is not None:
        on_event(event)
      ended = book.observe(event)
      request = follow_up(ended) if ended and follow_up else None
      if request is not None:
        heapq.heappush(arrivals, (request.arrival_s, next(order), request))

  hear(cluster.step(cluster.backend.now_s()))  # what an SSD still holds
  while arrivals or not cluster.idle:
    now_s = cluster.backend.now_s()
    while arrivals and arrivals[0][0] <= now_s:
      request = heapq.heappop(arrivals)[2]
      _arrive(request, conductor, cluster, book, journal, now_s)
    hear(cluster.step(arrivals[0][0] if arrivals else None))
  return book.records, journal


def replay(
  journal: Journal, requests: Iterable[Request], conductor: Conductor
) -> list[Placement | Rejection]:
  """Asks a fresh Conductor what a recorded run asked; same spec, same answers.

  Args:
    journal: as `serve` returned it.
    requests: all requests that it names, follow-ups included.
    conductor: new, with the specs of the run.
  """
  by_id = {request.request_id: request for request in requests}
  decisions = []
  for entry in journal:
    if isinstance(entry, Decision):
      decisions.append(conductor.place(by_id[entry.request_id], entry.now_s))
    else:
      conductor.observe(entry)
  return decisions


def _arrive(
  request: Request,
  conductor: Conductor,
  cluster: Cluster,
  book: RecordBook,
  journal: Journal,
  now_s: float,
) -> None:
  """Places one request; a bad one is recorded and the run goes on."""
  if reason := cluster.refusal(request):
    book.refused(request, reason, now_s)
    return
  decision = conductor.place(request, now_s)
  journal.append(Decision(now_s, request.request_id, decision))
  book.decided(request, decision, now_s)
  if isinstance(decision, Placement):
    cluster.submit(request, decision)
