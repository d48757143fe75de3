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

from mooncake_jax.arrivals import Agenda
from mooncake_jax.blocks.segments import owner
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
Note = Callable[[Decision], None]
# Called with each finished record; may give the session's next request.
FollowUp = Callable[[RequestRecord], Request | None]


def serve(
  requests: Iterable[Request] | Agenda,
  conductor: Conductor,
  cluster: Cluster,
  follow_up: FollowUp | None = None,
  on_event: Callable[[Event], None] | None = None,
  keeps_journal: bool = True,
  changes: Changes = NOTHING,
  on_decision: Callable[[Decision], None] | None = None,
  on_record: Callable[[RequestRecord], None] | None = None,
  book: RecordBook | None = None,
) -> tuple[list[RequestRecord], Journal]:
  """Serves all requests to their ends.

  Args:
    requests: in any order; each is taken at its arrival_s. Or what they come
      from as they come, `arrivals.Live`, with all that is to happen meanwhile.
    conductor: places them; sees every event.
    cluster: serves them.
    follow_up: see `FollowUp`; closes the loop of a conversation.
    on_event: called with each event, as it happens.
    changes: what happens meanwhile; what would be after the last request's
      end does not.
    keeps_journal: else it stays empty, and the cluster tells of no works.
    on_decision: called with each decision, before its request's first event.
    on_record: called with each record as it ends, however it does; then it is
      let go, and none is returned: a server's would grow for ever.
    book: where the records are kept, for whoever wants to look at them in the
      loop's thread; empty.

  Returns:
    One record a request, in order of arrival, and the journal.

  Raises:
    NotConserved: requests, tokens, blocks or bytes were lost or made up, which
      is an error of the system and not of the workload.
  """
  agenda = requests
  if not isinstance(agenda, Agenda):
    agenda = Agenda(agenda, changes)
  book = RecordBook() if book is None else book
  journal = [] if keeps_journal else _Nowhere()
  cluster.tells_works = keeps_journal
  note = _noting(journal, on_decision)
  retries = Retries(conductor, cluster, book, note)
  balance = Conservation({})

  def let_go(record: RequestRecord) -> None:
    if on_record is not None:
      book.forget(record.request_id)
      balance.forget()
      on_record(record)

  def hear(events: list[Event]) -> None:
    for event in events:
      conductor.observe(event)
      journal.append(event)
      if on_event is not None:
        on_event(event)
      if not isinstance(event, RequestEvent):
        book.observe(event)
        balance.observe_store(event)
        continue
      balance.computed(event)
      if isinstance(event, ENDS) and retries.again(event):
        continue
      ended = book.observe(event)
      balance.observe_request(event, book[event.request_id])
      request = follow_up(ended) if ended and follow_up else None
      if request is not None:
        agenda.add(request)
      if ended is not None:
        let_go(ended)

  hear(cluster.step(cluster.backend.now_s()))  # what an SSD still holds
  balance = Conservation(cluster.held_blocks())
  while agenda.is_open or not cluster.idle:
    now_s = cluster.backend.now_s()
    # What is known, such as a drain, is heard before anybody is placed.
    while not cluster.has_news and (due := agenda.take(now_s)):
      if not isinstance(due, Request):
        due.happen(cluster)
        continue
      balance.took()
      if _arrive(due, conductor, cluster, book, note, now_s):
        retries.remember(due)
      else:
        let_go(book[due.request_id])
    hear(cluster.step(agenda.next_s))
    now_s = cluster.backend.now_s()
    if doubtful := conductor.doubtful(now_s):
      hear([*cluster.inventories(doubtful)])
    if advice := conductor.advise(now_s):
      _carry_out(advice, cluster)
  balance.check(book.records, cluster.held_blocks(), cluster.leaks())
  return book.records, journal


def _noting(
  journal: Journal, on_decision: Callable[[Decision], None] | None
) -> Note:
  """Puts a decision into the journal and tells it."""
  if on_decision is None:
    return journal.append

  def note(decision: Decision) -> None:
    journal.append(decision)
    on_decision(decision)

  return note


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
    note: Note,
  ):
    self._conductor = conductor
    self._cluster = cluster
    self._book = book
    self._note = note
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
    decision = _ask(self._conductor, self._note, request, now_s, attempt, avoid)
    if isinstance(decision, Rejection):
      return False
    self._book.retried(event)
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
  note: Note,
  now_s: float,
) -> bool:
  """Places one request; a bad one is recorded and the run goes on.

  Returns:
    Whether it was let in.
  """
  if reason := cluster.refusal(request):
    book.refused(request, reason, now_s)
    return False
  decision = _ask(conductor, note, request, now_s)
  book.decided(request, decision, now_s)
  if isinstance(decision, Rejection):
    return False
  cluster.submit(request, decision)
  return True


def _ask(
  conductor: Conductor,
  note: Note,
  request: Request,
  now_s: float,
  attempt: int = 0,
  avoid: tuple[str, ...] = (),
) -> Placement | Rejection:
  """The Conductor's decision, which is noted."""
  asked = (request, now_s, attempt, frozenset(avoid))
  keeps = conductor.spec.keep_explanations
  why = conductor.explain(*asked) if keeps else None
  decision = conductor.place(*asked)
  note(Decision(now_s, request.request_id, decision, attempt, avoid, why))
  return decision
