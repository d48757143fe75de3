# SPDX-License-Identifier: Apache-2.0
"""Which instance is believed to hold which block, and how far a prompt
matches.

Two kinds of belief: `stored` blocks were reported by the store; `expected`
ones belong to a request placed there whose blocks are still to be stored, so
that the next request of the same prefix follows it (FAST'25 section 4.1: the
instance's cache is updated at once). A match ends at the first block an
instance lacks; nothing after it counts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_jax.request import BlockKey


@dataclass(frozen=True)
class Match:
  """Leading blocks of a prompt an instance can give.

  Attributes:
    stored: blocks it holds now, which others may fetch too.
    usable: the same with those expected there by the time they are needed.
    slow: of the usable ones, those that lie on its SSD only.
    fast: leading blocks that lie in its device memory.
  """

  stored: int = 0
  usable: int = 0
  slow: int = 0
  fast: int = 0


class PrefixIndex:
  """Beliefs about blocks of all instances."""

  def __init__(self):
    # key -> instance -> the media it has the block on
    self._stored: dict[BlockKey, dict[str, frozenset[str]]] = {}
    self._expected: dict[BlockKey, Counter[str]] = {}

  def add(
    self, instance: str, keys: Iterable[BlockKey], tier: str = 'host'
  ) -> None:
    for key in keys:
      tiers = self._stored.setdefault(key, {})
      tiers[instance] = tiers.get(instance, frozenset()) | {tier}

  def discard(
    self, instance: str, keys: Iterable[BlockKey], tier: str = 'host'
  ) -> None:
    """Forgets blocks; unknown ones are ignored (late and repeated events)."""
    for key in keys:
      tiers = self._stored.get(key)
      if tiers is None or instance not in tiers:
        continue
      tiers[instance] -= {tier}
      if not tiers[instance]:
        del tiers[instance]
      if not tiers:
        del self._stored[key]

  def forget(self, instance: str) -> None:
    """Forgets all that an instance held or was expected to hold."""
    for key in [k for k, tiers in self._stored.items() if instance in tiers]:
      del self._stored[key][instance]
      if not self._stored[key]:
        del self._stored[key]
    for key in [k for k, c in self._expected.items() if instance in c]:
      del self._expected[key][instance]
      if not self._expected[key]:
        del self._expected[key]

  def expect(self, instance: str, keys: Iterable[BlockKey]) -> None:
    for key in keys:
      self._expected.setdefault(key, Counter())[instance] += 1

  def unexpect(self, instance: str, keys: Iterable[BlockKey]) -> None:
    for key in keys:
      counts = self._expected.get(key)
      if counts is None or instance not in counts:
        continue
      counts[instance] -= 1
      if not counts[instance]:
        del counts[instance]
      if not counts:
        del self._expected[key]

  def match(self, keys: tuple[BlockKey, ...]) -> dict[str, Match]:
    """Longest matches of the instances that match at least one block."""
    stored = self._walk(keys, self._sources)
    usable = self._walk(keys, self._holders)
    return {
      instance: Match(
        stored.get(instance, 0),
        count,
        self._slow(instance, keys[:count]),
        self._fast(instance, keys[:count]),
      )
      for instance, count in usable.items()
    }

  def __len__(self) -> int:
    """Number of distinct blocks stored somewhere."""
    return len(self._stored)

  def _sources(self, key: BlockKey) -> list[str]:
    """Who has the block where others can read it: on no device only."""
    tiers = self._stored.get(key, {})
    return [name for name, media in tiers.items() if media != {'device'}]

  def _holders(self, key: BlockKey) -> set[str]:
    return self._stored.get(key, {}).keys() | self._expected.get(key, {}).keys()

  def _slow(self, instance: str, keys: tuple[BlockKey, ...]) -> int:
    """How many of the keys the instance has on its SSD only."""
    return sum(
      self._stored.get(key, {}).get(instance) == {'ssd'}
      and instance not in self._expected.get(key, ())
      for key in keys
    )

  def _fast(self, instance: str, keys: tuple[BlockKey, ...]) -> int:
    """How many of the leading keys the instance has on its device."""
    for i, key in enumerate(keys):
      if 'device' not in self._stored.get(key, {}).get(instance, ()):
        return i
    return len(keys)

  def _walk(self, keys, holders) -> dict[str, int]:
    """For five keys held by {a,b} {a,b} {a} {b} {a}: a matches 3, b 2."""
    matched: dict[str, int] = {}
    alive = None
    for i, key in enumerate(keys):
      here = set(holders(key))
      alive = here if alive is None else alive & here
      if not alive:
        break
      for instance in alive:
        matched[instance] = i + 1
    return matched
