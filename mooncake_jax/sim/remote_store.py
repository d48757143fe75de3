# SPDX-License-Identifier: Apache-2.0
"""A Mooncake Store in a simulation: blocks by key, whoever put them.

Give one to several `VirtualBackend`s to let their clusters share it, or fill
it with what other processes are to have put there.
"""

from collections.abc import Iterable

from mooncake_jax.request import BlockKey


class RemoteStore:
  """Which blocks there are; all of a block's layers come and go together."""

  def __init__(self, keys: Iterable[BlockKey] = ()):
    self._keys = set(keys)

  def put(self, key: BlockKey) -> None:
    self._keys.add(key)

  def has(self, key: BlockKey) -> bool:
    return key in self._keys

  def evict(self, keys: Iterable[BlockKey]) -> None:
    """Lets blocks go without a word to anybody."""
    self._keys.difference_update(keys)
