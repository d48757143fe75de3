# SPDX-License-Identifier: Apache-2.0
"""Hot prefixes are copied ahead of demand, and cooled again.

Heat is how often a second a prefix is asked for, forgotten with a half-life. A
prefix here is what a placed request was found to share with others: the
longest one that anybody had stored. Where a copy is asked for more often than
`hot_per_s`, one more is advised at the least busy instance that lacks it; a
copy that was made so is dropped when its prefix falls under `cool_per_s` a
copy, well below, so that nothing is copied to and fro. Bytes copied are bounded
by a budget that fills up at `copy_bytes_per_s`; a copy that is not there after
`copy_timeout_s` was not made, for want of room or of its source, and the bytes
of what is missing go back to the budget.

As in FAST'25 section 4.2, hot-spot migration. Differs: there copies only arise
from fetches; these are made before the next request has to fetch.
"""

from dataclasses import dataclass
import math

from mooncake_jax.conductor.advice import Advice
from mooncake_jax.conductor.advice import DropCopies
from mooncake_jax.conductor.advice import Replicate
from mooncake_jax.conductor.matches import Match
from mooncake_jax.conductor.matches import positions
from mooncake_jax.conductor.prefix_index import PrefixIndex
from mooncake_jax.request import BlockKey


@dataclass(frozen=True)
class Replication:
  """How hot prefixes are copied.

  Attributes:
    hot_per_s, cool_per_s: requests a second and copy: above the first a copy
      is added, under the second one that was added is dropped.
    half_life_s: of the heat.
    copy_bytes_per_s: budget; saves up for `burst_s` at most.
    min_blocks: shorter prefixes are not worth a copy.
    max_prefixes: how many are kept in mind.
    copy_timeout_s: how long an advised copy counts before it is heard of.
    look_every_s: what is hot is looked for at most so often, which takes time
      in the prefixes kept in mind.
  """

  hot_per_s: float = 0.5
  cool_per_s: float = 0.1
  half_life_s: float = 60.0
  copy_bytes_per_s: float = 1e9
  burst_s: float = 10.0
  min_blocks: int = 4
  max_prefixes: int = 1024
  copy_timeout_s: float = 30.0
  look_every_s: float = 0.5

  def __post_init__(self):
    for name in (
      'hot_per_s',
      'half_life_s',
      'copy_bytes_per_s',
      'burst_s',
      'copy_timeout_s',
    ):
      if not getattr(self, name) > 0:
        raise ValueError(
          f'Replication.{name}={getattr(self, name)} must be > 0'
        )
    if not 0 <= self.cool_per_s < self.hot_per_s:
      raise ValueError(
        f'Replication.cool_per_s={self.cool_per_s} must be in '
        f'[0, hot_per_s={self.hot_per_s})'
      )
    if not self.look_every_s >= 0:
      raise ValueError(
        f'Replication.look_every_s={self.look_every_s} must be >= 0'
      )
    for name in ('min_blocks', 'max_prefixes'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'Replication.{name}={getattr(self, name)} must be >= 1'
        )


@dataclass
class _Prefix:
  keys: tuple[BlockKey, ...]
  heat: float = 0.0
  since_s: float = 0.0


@dataclass
class _Copy:
  """An advised one; `was_there` once it has been heard of."""

  keys: tuple[BlockKey, ...]
  advised_s: float
  was_there: bool = False


class Heat:
  """How hot prefixes are, and which copies were advised."""

  def __init__(self, rules: Replication, block_bytes: int):
    self._rules = rules
    self._block_bytes = block_bytes
    self._prefixes: dict[BlockKey, _Prefix] = {}
    self._copies: dict[tuple[BlockKey, str], _Copy] = {}
    self._budget_bytes = 0.0
    self._filled_s = 0.0
    self._look_s = 0.0  # not before then

  def ask(self, keys: tuple[BlockKey, ...], now_s: float) -> None:
    """A request shares these leading blocks with earlier ones."""
    if len(keys) < self._rules.min_blocks:
      return
    tip = keys[-1]
    prefix = self._prefixes.pop(tip, None) or _Prefix(keys, since_s=now_s)
    prefix.heat = self._cooled(prefix, now_s) + 1.0
    prefix.since_s = now_s
    self._prefixes[tip] = prefix  # the latest last
    if len(self._prefixes) > self._rules.max_prefixes:
      del self._prefixes[next(iter(self._prefixes))]

  def per_s(self, tip: BlockKey, now_s: float) -> float:
    """Requests a second for the prefix that ends in this block."""
    prefix = self._prefixes.get(tip)
    if prefix is None:
      return 0.0
    # A steady rate r leaves a heat of r * half_life / ln 2.
    return self._cooled(prefix, now_s) * math.log(2) / self._rules.half_life_s

  def advise(
    self, index: PrefixIndex, idle_first: list[str], now_s: float
  ) -> list[Advice]:
    """Copies to add and to drop; what is advised is taken to be done.

    Args:
      idle_first: instances that may get a copy, the least busy first.
    """
    if now_s < self._look_s:
      return []
    self._look_s = now_s + self._rules.look_every_s
    self._fill(now_s)
    cooled = self._cool(self._kept(index, idle_first, now_s), now_s)
    return [*cooled, *self._copy(index, idle_first, now_s)]

  def _copy(
    self, index: PrefixIndex, idle_first: list[str], now_s: float
  ) -> list[Advice]:
    advice: list[Advice] = []
    hottest = sorted(self._prefixes, key=lambda tip: -self.per_s(tip, now_s))
    for tip in hottest:
      per_s = self.per_s(tip, now_s)
      if per_s <= self._rules.hot_per_s:
        break
      keys = self._prefixes[tip].keys
      num_bytes = len(keys) * self._block_bytes
      holders = _holders(index, keys)
      # An advised copy counts from now on, not only once it is reported.
      advised = {name for at, name in self._copies if at == tip}
      target = next(
        (n for n in idle_first if n not in advised.union(holders)), None
      )
      enough = per_s <= self._rules.hot_per_s * len(advised.union(holders))
      if not holders or enough or target is None:
        continue
      if num_bytes > self._budget_bytes:
        break
      self._budget_bytes -= num_bytes
      self._copies[tip, target] = _Copy(keys, now_s)
      advice.append(Replicate(keys, holders[0], target))
    return advice

  def _kept(
    self, index: PrefixIndex, idle_first: list[str], now_s: float
  ) -> dict[tuple[BlockKey, str], list[str]]:
    """Forgets copies that are gone, or were never made.

    Returns:
      Who holds the prefix of each of the others.
    """
    kept: dict[tuple[BlockKey, str], list[str]] = {}
    for (tip, name), copy in list(self._copies.items()):
      holders = _holders(index, copy.keys)
      if name in holders:
        copy.was_there = True
        kept[tip, name] = holders
        continue
      late = now_s - copy.advised_s > self._rules.copy_timeout_s
      if late and not copy.was_there:
        there = index.match(copy.keys).get(name, Match()).stored
        self._save_up((len(copy.keys) - there) * self._block_bytes)
      if late or copy.was_there or name not in idle_first:
        del self._copies[tip, name]
      else:
        kept[tip, name] = holders
    return kept

  def _cool(
    self, kept: dict[tuple[BlockKey, str], list[str]], now_s: float
  ) -> list[Advice]:
    advice: list[Advice] = []
    for (tip, name), holders in kept.items():
      copies = max(len(holders), 1)
      if self.per_s(tip, now_s) < self._rules.cool_per_s * copies:
        copy = self._copies.pop((tip, name))
        if name in holders and len(holders) > 1:
          advice.append(DropCopies(copy.keys, name))
    return advice

  def _cooled(self, prefix: _Prefix, now_s: float) -> float:
    age_s = max(now_s - prefix.since_s, 0.0)
    return prefix.heat * 0.5 ** (age_s / self._rules.half_life_s)

  def _fill(self, now_s: float) -> None:
    filled_s = max(now_s - self._filled_s, 0.0)
    self._filled_s = max(now_s, self._filled_s)
    self._save_up(self._rules.copy_bytes_per_s * filled_s)

  def _save_up(self, num_bytes: float) -> None:
    most = self._rules.copy_bytes_per_s * self._rules.burst_s
    self._budget_bytes = min(self._budget_bytes + num_bytes, most)


def _holders(index: PrefixIndex, keys: tuple[BlockKey, ...]) -> list[str]:
  """Instances that others could read the whole prefix from."""
  for length, mask in index.match(keys).sources():
    if length == len(keys):
      return [index.names[p] for p in positions(mask)]
  return []
