# SPDX-License-Identifier: Apache-2.0
"""What became of requests while processes were killed, and how long it took.

Recovery is from a kill to when, over the next `WINDOW_S`, `ENOUGH` of the
requests that came in such a time are served again, in time and completed;
cancelled ones are not asked for.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from statistics import median

from mooncake_jax.distributed.holdings import Holdings
from mooncake_jax.events import ENDS
from mooncake_jax.events import Event
from mooncake_jax.events import InstanceJoined
from mooncake_jax.events import InstanceLost
from mooncake_jax.metrics.summary import is_effective
from mooncake_jax.request import RequestRecord
from mooncake_jax.slo import SLO
from scripts.benches.chaos_load import Kill
from scripts.benches.rows import Curve
from scripts.benches.rows import Row

SLO_HERE = SLO(ttft_s=5.0, tbt_s=1.0)
WINDOW_S, BEFORE_S, STEP_S, ENOUGH = 2.0, 10.0, 0.1, 0.8
RECOVERY_S, LATE_S = 5.0, 1.0
NEW_THREADS = 2  # that come and go: of a connection that is being opened


@dataclass
class Found:
  """What a run gave.

  Attributes:
    right: the tokens that each text gets.
    clock: of the run.
    timeout_s: of a request.
    on_hosts: why processes share this host; '' if they don't.
    served_s: when requests ended that kept the SLO.
    failures: by reason; of requests that were tried in vain.
    late: requests that ended so long after their deadline.
    wrong: requests whose tokens are not those of their text.
    lost_s, joined_s: of instances, as the driver heard.
    before, after: what processes hold.
    leftovers: what nobody should hold at the end.
  """

  right: Mapping[str, tuple[int, ...]]
  clock: Callable[[], float]
  seconds: float
  timeout_s: float
  on_hosts: str = ''
  asked: int = 0
  outcomes: Counter[str] = field(default_factory=Counter)
  failures: Counter[str] = field(default_factory=Counter)
  again: int = 0
  served_s: list[float] = field(default_factory=list)
  num_tokens: int = 0
  wrong: list[str] = field(default_factory=list)
  late: list[str] = field(default_factory=list)
  ends: Counter[tuple[str, int]] = field(default_factory=Counter)
  kills: list[Kill] = field(default_factory=list)
  lost_s: list[tuple[str, float]] = field(default_factory=list)
  joined_s: list[tuple[str, float]] = field(default_factory=list)
  before: Mapping[str, Holdings] = field(default_factory=dict)
  after: Mapping[str, Holdings] = field(default_factory=dict)
  leftovers: Sequence[str] = ()

  def heard(self, event: Event) -> None:
    """See `serve`."""
    if isinstance(event, ENDS):
      self.ends[event.request_id, event.attempt] += 1
    elif isinstance(event, InstanceLost):
      self.lost_s.append((event.instance, event.time_s))
    elif isinstance(event, InstanceJoined):
      self.joined_s.append((event.instance, event.time_s))

  def ended(self, record: RequestRecord) -> None:
    """Takes a record as it ends; see `serve`."""
    now_s = self.clock()
    self.outcomes[record.outcome] += 1
    self.again += record.attempt > 0
    tokens = tuple(record.output_tokens)
    right = self.right[record.request_id.partition('.')[2]]
    whole = len(right) if record.outcome == 'completed' else len(tokens)
    if tokens != right[:whole]:
      self.wrong.append(record.request_id)
    self.num_tokens += len(record.output_tokens)
    if record.outcome not in ('completed', 'cancelled'):
      self.failures[record.reason] += 1
    if now_s > record.arrival_s + self.timeout_s + LATE_S:
      self.late.append(record.request_id)
    if is_effective(record, SLO_HERE):
      self.served_s.append(now_s)


def recoveries_s(found: Found) -> list[float]:
  """Of each kill; infinite where goodput was not back before the next."""
  served_s = sorted(found.served_s)

  def count(start_s: float, stop_s: float) -> int:
    return bisect_left(served_s, stop_s) - bisect_left(served_s, start_s)

  took = []
  for kill in found.kills:
    before = count(kill.time_s - BEFORE_S, kill.time_s) * WINDOW_S / BEFORE_S
    steps = range(round((found.seconds - kill.time_s) / STEP_S))
    took.append(
      next(
        (
          step * STEP_S
          for step in steps
          if count(at_s := kill.time_s + step * STEP_S, at_s + WINDOW_S)
          >= ENOUGH * before
        ),
        float('inf'),
      )
    )
  return took


def _after(
  kills: Sequence[Kill], news: Sequence[tuple[str, float]]
) -> list[float]:
  """Seconds from each kill to the next such news of its instance, if any."""
  waits = [
    [at_s - kill.time_s for name, at_s in news if name == kill.instance]
    for kill in kills
  ]
  later = [[wait for wait in each if wait >= 0] for each in waits]
  return [min(each) for each in later if each]


def _is_last(found: Found, kill: Kill) -> bool:
  """Whether no other of its role was there, as far as was heard."""
  role = kill.instance.rstrip('0123456789')
  lost, joined = (
    Counter(
      name
      for name, at_s in news
      if at_s <= kill.time_s and name.startswith(role) and name != kill.instance
    )
    for news in (found.lost_s, found.joined_s)
  )
  return bool(lost - joined)


def goodput(found: Found) -> Curve:
  """Requests/s that kept the SLO, by windows of `WINDOW_S`, and the kills."""
  counts = Counter(int(at_s / WINDOW_S) for at_s in found.served_s)
  points = tuple(
    ((i + 0.5) * WINDOW_S, counts[i] / WINDOW_S)
    for i in range(int(found.seconds / WINDOW_S))
  )
  kills = tuple(kill.time_s for kill in found.kills)
  about = 'each line a process killed'
  return Curve(points, 's', 'requests/s in time', kills, about)


def rows(found: Found) -> list[Row]:
  """What a run gave; whatever was lost or kept misses its target."""
  ended = found.outcomes.total() - found.outcomes['running']
  took, heard = recoveries_s(found), _after(found.kills, found.lost_s)
  back = _after(found.kills, found.joined_s)
  loss = 'one link loses 1 % of packets'
  if found.on_hosts:
    loss = f'no packets are lost: {found.on_hosts}'
  threads = [
    held.num_threads - found.before[name].num_threads
    for name, held in found.after.items()
  ]

  def none(name: str, value: float, what: str = '') -> Row:
    return Row(f'chaos.{name}', value, '', what, 0.0, at_most=True)

  return [
    Row('chaos.requests', found.asked, '', f'{_told(found.outcomes)}; {loss}'),
    Row(
      'chaos.kills',
      len(found.kills),
      '',
      _told(Counter(kill.instance for kill in found.kills)),
    ),
    Row(
      'chaos.kills_of_the_last',
      sum(_is_last(found, kill) for kill in found.kills),
      '',
      'of a role, as its other one was not back yet',
    ),
    Row('chaos.tried_again', found.again, '', 'requests'),
    Row('chaos.failed', found.failures.total(), '', _told(found.failures)),
    none('unaccounted', abs(found.asked - ended), 'requests without one end'),
    none('ended_twice', sum(n > 1 for n in found.ends.values()), 'tries'),
    none('late', len(found.late), f'ended past {found.timeout_s:.0f} s'),
    none(
      'wrong',
      len(found.wrong),
      f'requests; all {found.num_tokens} tokens were compared',
    ),
    none('leftovers', len(found.leftovers), '; '.join(found.leftovers[:3])),
    Row(
      'chaos.new_threads',
      max(threads, default=0),
      '',
      'of one process',
      NEW_THREADS,
      at_most=True,
    ),
    Row(
      'chaos.goodput',
      len(found.served_s) / found.seconds,
      'requests/s',
      f'of {found.asked / found.seconds:.2f} asked',
      curve=goodput(found),
    ),
    Row(
      'chaos.recovery_s',
      max(took, default=0.0),
      's',
      f'the longest, median {median(took or [0]):.1f}, '
      f'{sum(t <= RECOVERY_S for t in took)} of {len(took)} kills in time; '
      f'goodput over {WINDOW_S:.0f} s at {ENOUGH} of before',
      RECOVERY_S,
      at_most=True,
    ),
    Row(
      'chaos.missed_s',
      max(heard, default=0.0),
      's',
      'the longest from a '
      f'kill until it was known, median {median(heard or [0]):.2f}',
    ),
    Row(
      'chaos.back_s',
      max(back, default=0.0),
      's',
      'the longest until the '
      f'process was there again, median {median(back or [0]):.1f}',
    ),
  ]


def _told(counts: Counter[str]) -> str:
  return ', '.join(f'{count} {name}' for name, count in counts.most_common(4))
