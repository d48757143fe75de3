# SPDX-License-Identifier: Apache-2.0
"""One memory of pages for prompts, outputs and a prefix cache, as vLLM's.

A sequence has pages of its own and shares cached blocks with others. A block
that nobody uses stays cached until its pages are needed: the least recently
used goes first, of one sequence's the tail first (vLLM 0.5.1,
`core/block_manager_v1.py` and `core/evictor_v1.py`).
"""

from collections import OrderedDict
from collections.abc import Sequence as Many
from dataclasses import dataclass

from mooncake_jax.request import BlockKey


@dataclass(eq=False)
class Held:
  """What a sequence holds: pages of its own, and cached blocks."""

  pages: int = 0
  blocks: tuple[BlockKey, ...] = ()


class PagedMemory:
  """Who has how many pages; `block_pages` of 0 caches nothing."""

  def __init__(
    self, num_pages: int, block_pages: int, watermark_pages: int = 0
  ):
    """Starts empty.

    Args:
      watermark_pages: that a new sequence must leave free.
    """
    self.num_pages = num_pages
    self._block_pages = block_pages
    self._watermark = watermark_pages
    self._free = num_pages
    self._users: dict[BlockKey, int] = {}
    self._idle: OrderedDict[BlockKey, None] = OrderedDict()

  @property
  def num_available(self) -> int:
    """Pages that are free or would be once idle blocks went."""
    return self._free + len(self._idle) * self._block_pages

  def admit(self, keys: Many[BlockKey], num_pages: int) -> Held | None:
    """Holds a prompt's pages, leading cached blocks among them.

    Args:
      keys: of the blocks that it may reuse.
      num_pages: of all of the prompt; as many must be had even where some are
        cached already, as in vLLM.

    Returns:
      What it holds; None if that can't be had now.
    """
    if self.num_available - num_pages < self._watermark:
      return None
    blocks = keys[: self.num_cached(keys)]
    for key in blocks:
      self._idle.pop(key, None)
      self._users[key] = self._users.get(key, 0) + 1
    own = num_pages - len(blocks) * self._block_pages
    self._take(own)
    return Held(own, tuple(blocks))

  def grow(self, held: Held, num_pages: int) -> None:
    """Gives a sequence more pages of its own; there must be so many."""
    self._take(num_pages)
    held.pages += num_pages

  def publish(self, held: Held, keys: Many[BlockKey]) -> None:
    """Makes a computed prompt's complete blocks cached ones that it shares.

    Those that another one published meanwhile stay its own.
    """
    if not self._block_pages:
      return
    for key in keys[len(held.blocks) :]:
      if key in self._users or key in self._idle:
        break
      self._users[key] = 1
      held.blocks += (key,)
      held.pages -= self._block_pages

  def release(self, held: Held) -> None:
    """Frees all that a sequence holds; its blocks stay cached."""
    self._free += held.pages
    held.pages = 0
    for key in reversed(held.blocks):
      self._users[key] -= 1
      if not self._users[key]:
        del self._users[key]
        self._idle[key] = None
    held.blocks = ()

  def check(self) -> None:
    """Raises AssertionError unless all pages are accounted for."""
    cached = (len(self._users) + len(self._idle)) * self._block_pages
    assert 0 <= self._free + cached <= self.num_pages
    assert not self._users.keys() & self._idle.keys()

  def num_cached(self, keys: Many[BlockKey]) -> int:
    """Leading blocks that are cached, in use or not."""
    if not self._block_pages:
      return 0
    found = 0
    for key in keys:
      if key not in self._users and key not in self._idle:
        break
      found += 1
    return found

  def _take(self, num_pages: int) -> None:
    while self._free < num_pages and self._idle:
      self._idle.popitem(last=False)
      self._free += self._block_pages
    assert self._free >= num_pages, f'{num_pages=} of {self._free}'
    self._free -= num_pages
