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

from mooncake_jax.blocks.segments import owner
from mooncake_jax.changes import Change
from mooncake_jax.changes import Changes
from mooncake_jax.changes import NOTHING
from mooncake_jax.cluster import Cluster
from mooncake_jax.conductor.advice import Advice
from mooncake_jax.conductor.advice import DropCopies
from mooncake_jax.conductor.advice import Replicate
from mooncake_jax.conductor.advice import SetRole
from mooncake_jax.conductor.conductor import Conductor
from mooncake_jax.conductor.explain import Explanation
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import Failed
from mooncake_jax.events import RequestEvent
from mooncake_jax.metrics.conservation import Conservation
from mooncake_jax.metrics.records import RecordBook
from mooncake_jax.request import Placement
from mooncake_jax.request import Rejection
from mooncake_jax.request import Request
from mooncake_jax.request import RequestRecord


@dataclass(frozen=True)
class Decision:
  """The Conductor was asked about a request at `now_s`.

  `avoid` names the instances that failed earlier tries of it; `why` is kept
  where `ConductorSpec.keep_explanations` asks for it.
  """

  now_s: float
  request_id: str
  decision: Placement | Rejection
  attempt: int = 0
  avoid: tuple[str, ...] = ()
  why: Explanation | None = None


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
  keeps_journal: bool = True,
  changes: Changes = NOTHING,
) -> tuple[list[RequestRecord], Journal]:
  """Serves all requests to their ends.

  Args:
    requests: in any order; each is taken at its arrival_s.
    conductor: places them; sees every event.
    cluster: serves them.
    follow_up: see `FollowUp`; closes the loop of a conversation.
    on_event: called with each event, as it happens.
    changes: what happens meanwhile; what would be after the last request's
      end does not.
    keeps_journal: else it stays empty, and the cluster tells of no works.

  Returns:
    One record a request, in order of arrival, and the journal.

  Raises:
    NotConserved: requests, tokens, blocks or bytes were lost or made up, which
      is an error of the system and not of the workload.
  """
  agenda = Agenda(requests, changes)
  book, journal = RecordBook(), [] if keeps_journal else _Nowhere()
  cluster.tells_works = keeps_journal
  retries = Retries(conductor, cluster, book, journal)
  balance = Conservation({})

  def hear(events: list[Event]) -> None:
    for event in events:
      conductor.observe(event)
      journal.append(event)
      if on_event is not None:
        on_event(event)
      if not isinstance(event, RequestEvent):
        balance.observe_store(event)
        continue
      if isinstance(event, ENDS) and retries.again(event):
        continue
      ended = book.observe(event)
      balance.observe_request(event, book[event.request_id])
      request = follow_up(ended) if ended and follow_up else None
      if request is not None:
        agenda.add(request)

  hear(cluster.step(cluster.backend.now_s()))  # what an SSD still holds
  balance = Conservation(cluster.held_blocks())
  while agenda.num_requests or not cluster.idle:
    now_s = cluster.backend.now_s()
    # What is known, such as a drain, is heard before anybody is placed.
    while not cluster.has_news and (due := agenda.take(now_s)):
      if isinstance(due, Change):
        due.happen(cluster)
        continue
      balance.took()
      if _arrive(due, conductor, cluster, book, journal, now_s):
        retries.remember(due)
    hear(cluster.step(agenda.next_s))
    if advice := conductor.advise(cluster.backend.now_s()):
      _carry_out(advice, cluster)
  balance.check(book.records, cluster.held_blocks(), cluster.leaks())
  return book.records, journal


class Agenda:
  """Requests to come and changes, in order of time, then of asking."""

  def __init__(self, requests: Iterable[Request], changes: Changes):
    self._order = itertools.count()
    self._changes = changes
    self._due: list[tuple[float, int, Request | Change]] = []
    self.num_requests = 0
    for change in changes.changes:
      self._push(change.at_s, change)
    for request in requests:
      self.add(request)

  @property
  def next_s(self) -> float | None:
    """When the next is due; None if there is none."""
    return self._due[0][0] if self._due else None

  def add(self, request: Request) -> None:
    """One more, and when its client will have gone."""
    self.num_requests += 1
    self._push(request.arrival_s, request)
    if change := self._changes.of(request):
      self._push(change.at_s, change)

  def take(self, now_s: float) -> Request | Change | None:
    """The next that is due by now, if any."""
    if not self._due or self._due[0][0] > now_s:
      return None
    due = heapq.heappop(self._due)[2]
    self.num_requests -= isinstance(due, Request)
    return due

  def _push(self, time_s: float, due: Request | Change) -> None:
    heapq.heappush(self._due, (time_s, next(self._order), due))


class _Nowhere(list[Decision | Event]):
  """The journal of a run that keeps none."""

  def append(self, entry: Decision | Event) -> None:
    """Forgets it."""


def _carry_out(advice: list[Advice], cluster: Cluster) -> None:
  """Copies and roles that the Conductor would have changed.

  Its view may be stale: what is no longer possible is left out.
  """
  for each in advice:
    segments = cluster.master.segments()
    owners = {*map(owner, segments)}
    match each:
      case Replicate() if each.source in owners and each.target in segments:
        cluster.replicate(each.keys, each.source, each.target)
      case DropCopies() if each.instance in segments:
        cluster.drop(each.keys, each.instance)
      case SetRole() if not cluster.role_refusal(each.instance, each.role):
        cluster.set_role(each.instance, each.role)


class Retries:
  """Tries that an instance failed are made again elsewhere."""

  def __init__(
    self,
    conductor: Conductor,
    cluster: Cluster,
    book: RecordBook,
    journal: Journal,
  ):
    self._conductor = conductor
    self._cluster = cluster
    self._book = book
    self._journal = journal
    self._requests: dict[str, Request] = {}
    self._avoid: dict[str, tuple[str, ...]] = {}

  def remember(self, request: Request) -> None:
    """A request that was let in."""
    self._requests[request.request_id] = request

  def again(self, event: RequestEvent) -> bool:
    """Whether a try that ended has failed and is made again, which this does.

    Late events of the old try are dropped by all who read them.
    """
    request = self._requests.pop(event.request_id, None)
    failed = self._avoid.pop(event.request_id, ())
    if not isinstance(event, Failed) or not event.retryable or not request:
      return False
    now_s, attempt = self._cluster.backend.now_s(), event.attempt + 1
    deadline_s = request.arrival_s + self._cluster.spec.request_timeout_s
    if attempt >= self._conductor.spec.max_attempts or now_s >= deadline_s:
      return False
    avoid = (*failed, event.instance)
    name = request.request_id
    decision = _ask(
      self._conductor, self._journal, request, now_s, attempt, avoid
    )
    if isinstance(decision, Rejection):
      return False
    self._book.decided(request, decision, now_s)
    self._cluster.submit(request, decision)
    self._requests[name], self._avoid[name] = request, avoid
    return True


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
      request, avoid = by_id[entry.request_id], frozenset(entry.avoid)
      decisions.append(
        conductor.place(request, entry.now_s, entry.attempt, avoid)
      )
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
) -> bool:
  """Places one request; a bad one is recorded and the run goes on.

  Returns:
    Whether it was let in.
  """
  if reason := cluster.refusal(request):
    book.refused(request, reason, now_s)
    return False
  decision = _ask(conductor, journal, request, now_s)
  book.decided(request, decision, now_s)
  if isinstance(decision, Rejection):
    return False
  cluster.submit(request, decision)
  return True


def _ask(
  conductor: Conductor,
  journal: Journal,
  request: Request,
  now_s: float,
  attempt: int = 0,
  avoid: tuple[str, ...] = (),
) -> Placement | Rejection:
  """The Conductor's decision, which goes into the journal."""
  asked = (request, now_s, attempt, frozenset(avoid))
  keeps = conductor.spec.keep_explanations
  why = conductor.explain(*asked) if keeps else None
  decision = conductor.place(*asked)
  name = request.request_id
  journal.append(Decision(now_s, name, decision, attempt, avoid, why))
  return decision
