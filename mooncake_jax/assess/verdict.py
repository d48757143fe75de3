# SPDX-License-Identifier: Apache-2.0
"""What follows from the figures: which system, why, and how sure that is.

Goodput decides, not hit rate: the highest rate at which the asked-for share of
all requests keeps both limits, on the workload's own arrivals, made faster and
slower. Each system's is found several times: as predicted, and in cases of what
may be otherwise (costs, the Conductor's predictions, another time of the day).
A gain counts where it is above `least_gain` in every case.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
import math
from typing import Literal

from mooncake_jax.assess.break_even import BreakEven
from mooncake_jax.assess.reuse import Reuse
from mooncake_jax.assess.supposed import needed_hit_rate
from mooncake_jax.assess.supposed import Supposed

Family = Literal['coupled', 'apart', 'store']
Answer = Literal[
  'adopt',
  'store_only',
  'apart_only',
  'no_store',
  'no',
  'unknown',
  'open',
  'none',
]
PREDICTED = 'as predicted'
LITTLE = 0.05  # a hit rate that no store could make a difference with

SENTENCES: dict[Answer, str] = {
  'adopt': (
    'Adopt it: disaggregation alone is a gain here, and the store another.'
  ),
  'store_only': (
    'Adopt it for its store: disaggregation without one would be no gain here.'
  ),
  'apart_only': (
    "Disaggregate, but don't build the store: what it would reuse is no gain."
  ),
  'no_store': (
    "Don't build the store: next to nothing could be reused. Whether to "
    'disaggregate without one is within the error of the prediction.'
  ),
  'no': "Don't: coupled instances serve this workload as well or better.",
  'unknown': (
    'Whether the store pays cannot be known from this trace: it does not say '
    'what prompts share.'
  ),
  'open': (
    'Not decided: the difference is within the error of the prediction.'
  ),
  'none': (
    'None of them: no system that was tried keeps these limits at any rate.'
  ),
}


@dataclass(frozen=True)
class Interval:
  """A figure as predicted, and its least and most over all cases."""

  low: float
  value: float
  high: float


@dataclass(frozen=True)
class System:
  """One alternative, at equal hardware.

  Attributes:
    goodputs: requests per second by case, 'as predicted' first; 0 where not
      even the slowest rate kept the limits. Only the best of a family has
      more than that one.
    share: of requests that keep both limits at the workload's own rate.
    hit_rate: at that rate; None if unknown.
    refuses: whether it lets requests go that it could not serve in time. The
      verdict is between systems that serve everybody: refusing the tenth that
      need not be served would pay for any of them.
    chunks: whether it is coupled and cuts prompts.
  """

  name: str
  family: Family
  goodputs: Mapping[str, float]
  share: float
  hit_rate: float | None
  ttft_p90_s: float | None
  tbt_p90_s: float | None
  refuses: bool = False
  chunks: bool = False

  @property
  def rate(self) -> float:
    return self.goodputs[PREDICTED]

  @property
  def goodput(self) -> Interval:
    rates = self.goodputs.values()
    return Interval(min(rates), self.rate, max(rates))


@dataclass(frozen=True)
class Verdict:
  """The answer, its reasons and what makes it doubtful."""

  answer: Answer
  sentence: str
  reasons: tuple[str, ...]
  doubts: tuple[str, ...]
  gains: dict[str, Interval]


def best(systems: Sequence[System], family: Family) -> System:
  """The one of the family that serves everybody with the highest goodput.

  Raises:
    ValueError: there is none.
  """
  found = [s for s in systems if s.family == family and not s.refuses]
  if not found:
    raise ValueError(f'verdict: no system of {family=}')
  return max(found, key=lambda system: system.rate)


def gain(system: System, over: System) -> Interval:
  """Ratio of goodputs less 1, case by case: +0.5 is half as much again."""
  ratios = {
    case: _ratio(rate, over.goodputs[case])
    for case, rate in system.goodputs.items()
    if case in over.goodputs
  }
  return Interval(min(ratios.values()), ratios[PREDICTED], max(ratios.values()))


def verdict(
  systems: Sequence[System],
  reuse: Reuse | None,
  even: BreakEven,
  least_gain: float = 0.1,
  doubts: Sequence[str] = (),
  facts: Sequence[str] = (),
  supposed: Sequence[Supposed] = (),
  most_rate: float = math.inf,
) -> Verdict:
  """Weighs the best of each family against the others.

  Args:
    doubts: what it rests on that may be otherwise.
    facts: of the workload; told with the reasons.
    supposed: what reuse would make of it, where it has or tells none.
    most_rate: who keeps the limits at this rate shows none: two of them can't
      be told apart.
  """
  coupled, apart, store = (
    best(systems, family) for family in ('coupled', 'apart', 'store')
  )
  gains = {
    'apart over coupled': gain(apart, coupled),
    'store over apart': gain(store, apart),
    'store over coupled': gain(store, coupled),
  }
  answer = _answer(gains, reuse, least_gain)
  if reuse and min(coupled.rate, apart.rate, store.rate) >= most_rate:
    answer = 'open' if reuse.hit_rate >= LITTLE else 'no_store'
  if not any(system.goodput.high for system in (coupled, apart, store)):
    answer = 'none'
  reasons = [
    *_about_reuse(reuse, even),
    *_about_needed(supposed, least_gain, most_rate),
    *([] if reuse else [_known(coupled, apart, least_gain, most_rate)]),
    *facts,
    *_goodputs((coupled, apart, store), gains),
    *_about_chunks(systems),
    *_about_refusing(systems, store),
    *_hits_without_gain(systems, least_gain),
  ]
  return Verdict(
    answer, SENTENCES[answer], tuple(reasons), tuple(doubts), gains
  )


def _answer(
  gains: Mapping[str, Interval], reuse: Reuse | None, least: float
) -> Answer:
  apart, store, whole = gains.values()
  if reuse is None:
    return 'unknown'
  pays = reuse.hit_rate >= LITTLE
  if pays and whole.low > least and store.low > least:
    return 'adopt' if apart.low > 0 else 'store_only'
  if apart.low > least and (store.high < least or not pays):
    return 'apart_only'
  if max(apart.high, whole.high if pays else apart.high) < least:
    return 'no'
  return 'open' if pays else 'no_store'


def _goodputs(
  chosen: Sequence[System], gains: Mapping[str, Interval]
) -> list[str]:
  words: dict[Family, str] = {
    'coupled': 'coupled instances',
    'apart': 'prefill and decode apart, no store',
    'store': 'Mooncake',
  }
  found = [
    f'Best of {words[system.family]}: {system.name}, {_shown(system)}.'
    for system in chosen
  ]
  return found + [
    f'Goodput, {name}: {_range(each)}.' for name, each in gains.items()
  ]


def _range(gained: Interval) -> str:
  if gained.low == math.inf:
    return 'some where there was none'
  low, value, high = map(percent, (gained.low, gained.value, gained.high))
  return f'{value} ({low} to {high})'


def _shown(system: System) -> str:
  each = system.goodput
  if not each.high:
    return 'no rate that was tried keeps the limits'
  return f'{each.value:.3g} requests/s ({each.low:.3g} to {each.high:.3g})'


def _known(
  coupled: System, apart: System, least: float, most_rate: float
) -> str:
  """What a trace of lengths alone does tell."""
  of = gain(apart, coupled)
  says = 'would be a gain' if of.low > least else 'may be a gain or not'
  if of.high < least:
    says = 'would be no gain'
  if min(coupled.rate, apart.rate) >= most_rate:
    says = f'and coupled ones all keep the limits up to {most_rate:.3g} /s'
  return f'What it does tell: prefill and decode apart, without reuse, {says}.'


def _about_refusing(systems: Sequence[System], store: System) -> list[str]:
  return [
    f'{system.name} would serve {percent(_ratio(system.rate, store.rate))} '
    'on top, by refusing whom it would serve too late.'
    for system in systems
    if system.refuses and system.rate > store.rate
  ]


def _about_chunks(systems: Sequence[System]) -> list[str]:
  """What chunked prefill is to a coupled pool."""
  pools = [system for system in systems if system.family == 'coupled']
  chunked = [system for system in pools if system.chunks]
  whole = [system for system in pools if not system.chunks]
  if not chunked or not whole:
    return []
  high, low = (max(s, key=lambda each: each.rate) for s in (chunked, whole))
  return [
    f'Chunked prefill in coupled instances: {_shown(high)}; without: '
    f'{_shown(low)}.'
  ]


def _about_needed(
  supposed: Sequence[Supposed], least_gain: float, most_rate: float
) -> list[str]:
  """Which hit rate would be needed."""
  if not supposed:
    return []
  needed = needed_hit_rate(supposed, least_gain)
  most = supposed[-1]
  if needed is None and most.store >= most_rate:
    return [
      'What hit rate a store would need is not known either: others keep the '
      f'limits up to {most_rate:.3g} requests/s too, the fastest rate tried.'
    ]
  if needed is None:
    return [
      'A store would be no gain at any hit rate that was supposed: at '
      f'{most.hit_rate:.0%} it serves {most.store:.3g} requests/s, the best '
      f'of the others {max(most.coupled, most.apart):.3g}.'
    ]
  return [
    f'A store would pay from a hit rate of about {needed:.0%} on: '
    f'{least_gain:.0%} more than the best of the others, coupled caches '
    'included, if each prompt began as an earlier one does.'
  ]


def _about_reuse(reuse: Reuse | None, even: BreakEven) -> list[str]:
  if reuse is None:
    return [
      'The trace has no hashes of its prompts: possible hits, working set, '
      'room and age of what is reused are unknown, and all systems were '
      'simulated without any reuse. Log hashes, or prompts, to know.'
    ]
  found = [
    f'{reuse.hit_rate:.1%} of the prompt tokens could be reused, by '
    f'{reuse.hit_prompts:.0%} of the prompts.'
  ]
  if reuse.capacity_tokens and reuse.hit_rate >= LITTLE:
    most = max(reuse.capacity_tokens)
    found.append(
      f'{most:.0%} of that takes room for '
      f'{reuse.capacity_tokens[most] / 1e6:.1f} M tokens.'
    )
    least = even.sure_tokens['DRAM']
    found.append(
      'Fetching from DRAM never beats recomputing on these costs.'
      if least is None
      else f'Fetching from DRAM beats recomputing from {least:,} tokens on.'
    )
  return found


def _hits_without_gain(systems: Sequence[System], least: float) -> list[str]:
  """Whoever hits more and serves no more: hit rate is not goodput."""
  coupled = [s for s in systems if s.family == 'coupled' and s.hit_rate]
  none = [s for s in systems if s.hit_rate == 0 and s.family == 'coupled']
  store, apart = best(systems, 'store'), best(systems, 'apart')
  pairs = [(store, apart)] if store.hit_rate else []
  if coupled and none:
    pairs.append((max(coupled, key=lambda s: s.rate), none[0]))
  return [
    f'Hits without a gain: {high.name} reuses {high.hit_rate:.0%} of the '
    f'tokens, and its goodput is that of {low.name} '
    f'{percent(gain(high, low).value)}: prefill is not what limits it.'
    for high, low in pairs
    if (high.hit_rate or 0) >= LITTLE and gain(high, low).value < least / 2
  ]


def _ratio(mine: float, others: float) -> float:
  if others == 0:
    return 0.0 if mine == 0 else float('inf')
  return mine / others - 1


def percent(share: float) -> str:
  """A gain as it is told; over nothing it has no size."""
  return 'from none' if share == math.inf else f'{share:+.0%}'
