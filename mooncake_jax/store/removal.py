# SPDX-License-Identifier: Apache-2.0
"""Removal by key, by prefix or by regular expression.

A block in use (leased, or with a copy under way) is refused, and told.
Removal takes pinned blocks too: it is asked for by name.
"""

from collections.abc import Callable
from collections.abc import Iterable
import re

from mooncake_jax.backend import Replica
from mooncake_jax.request import BlockKey
from mooncake_jax.store.ledger import Ledger
from mooncake_jax.store.outcomes import Evicted
from mooncake_jax.store.outcomes import Removed


class Removal(Ledger):
  """The Master's removals."""

  def remove(self, key: BlockKey, now_s: float) -> tuple[Replica, ...] | None:
    """Removes a block; its replicas to drop, or None while it is in use."""
    self._counts.calls['remove'] += 1
    gone = self._remove(key, now_s)
    return None if gone is None else tuple(e.replica for e in gone)

  def remove_prefix(self, hex_prefix: str, now_s: float) -> Removed:
    """Removes all blocks whose key in hex begins so; '' removes all.

    Raises:
      ValueError: not lower-case hex.
    """
    if not re.fullmatch('[0-9a-f]*', hex_prefix):
      raise ValueError(f'{hex_prefix=} must be lower-case hexadecimal')
    return self._remove_where(
      lambda key: key.hex().startswith(hex_prefix), now_s
    )

  def remove_regex(self, pattern: str, now_s: float) -> Removed:
    """Removes all blocks in whose key in hex the pattern is found.

    Raises:
      ValueError: not a regular expression.
    """
    try:
      search = re.compile(pattern).search
    except re.error as error:
      raise ValueError(f'{pattern=}: {error}') from error
    return self._remove_where(lambda key: search(key.hex()) is not None, now_s)

  def discard(self, replica: Replica) -> tuple[Evicted, ...]:
    """Forgets a replica whose bytes are bad or gone, leased or not.

    With it go the half-written copies that are made from it.
    """
    self._counts.calls['discard'] += 1
    copy = self._find_alone(replica)
    if copy is None:
      return ()
    orphans = [t for t, task in self._tasks.items() if task.src == replica]
    return self._forget([*orphans, copy])

  def _remove_where(
    self, matches: Callable[[BlockKey], bool], now_s: float
  ) -> Removed:
    self._counts.calls['remove_where'] += 1
    evicted: list[Evicted] = []
    refused: list[BlockKey] = []
    for key in [key for key in self._spans if matches(key)]:
      gone = self._remove(key, now_s)
      if gone is None:
        refused.append(key)
      else:
        evicted += gone
    for segment in self._segments.values():
      self._tidy(segment)
    return Removed(tuple(evicted), tuple(refused))

  def _remove(self, key: BlockKey, now_s: float) -> Iterable[Evicted] | None:
    span = self._alone(key)
    if span is None:
      return ()
    if span.lease_until_s >= now_s or span.is_open():
      return None
    return self._forget(tuple(span.copies()))
