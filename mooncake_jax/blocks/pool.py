# SPDX-License-Identifier: Apache-2.0
"""Who holds which device page: bookkeeping only, no bytes."""


class PagePool:
  """A fixed number of pages, numbered from 1; page 0 is scratch."""

  def __init__(self, num_pages: int):
    """Makes a pool of `num_pages` pages, scratch included."""
    if num_pages < 2:
      raise ValueError(f'{num_pages=} must be >= 2 (page 0 is scratch)')
    self.num_pages = num_pages
    self._free = list(range(num_pages - 1, 0, -1))
    self._held: set[int] = set()

  @property
  def num_free(self) -> int:
    return len(self._free)

  @property
  def capacity(self) -> int:
    return self.num_pages - 1

  def hold(self, count: int) -> tuple[int, ...] | None:
    """Takes `count` pages for the caller until release; None if too few."""
    if count > len(self._free):
      return None
    if not count:
      return ()
    pages = tuple(self._free[: -count - 1 : -1])
    del self._free[-count:]
    self._held.update(pages)
    return pages

  def release(self, pages: tuple[int, ...]) -> None:
    """Gives pages back; each must be held."""
    if not self._held.issuperset(pages):
      raise KeyError(f'pages {set(pages) - self._held} are not held')
    self._held.difference_update(pages)
    self._free += pages[::-1]

  def check(self) -> None:
    """Raises AssertionError unless free + held = capacity, no page twice."""
    free = set(self._free)
    assert len(free) == len(self._free), 'a page is free twice'
    assert not free & self._held, 'a page is free and held'
    assert free | self._held == set(range(1, self.num_pages)), 'a page is lost'
