# SPDX-License-Identifier: Apache-2.0
"""Registered memory: what ops may read and write.

A region is a range of an instance's device pages, or a whole segment of
another medium. Any thread may call.
"""

from dataclasses import dataclass
import threading
from typing import Literal

from mooncake_jax.backend import DevicePages
from mooncake_jax.backend import Replica

Medium = Literal['device', 'host', 'ssd', 'remote']


@dataclass(frozen=True)
class Region:
  """Memory of one medium.

  Attributes:
    name: of the instance whose pages these are, or of the segment.
    pages: of a device region, [start, stop); else None.
  """

  name: str
  medium: Medium
  pages: range | None = None

  def __post_init__(self):
    if (self.pages is None) == (self.medium == 'device'):
      raise ValueError(f'{self}: device regions, and they alone, have pages')

  def overlaps(self, other: 'Region') -> bool:
    if self.pages is None or other.pages is None:
      return self.name == other.name and self.pages is other.pages
    a, b = self.pages, other.pages
    return self.name == other.name and a.start < b.stop and b.start < a.stop

  def holds(self, side: DevicePages | Replica) -> bool:
    """Whether some of the side's memory is of this region."""
    if isinstance(side, Replica):
      return self.pages is None and self.name == side.segment
    return (
      self.pages is not None
      and self.name == side.instance
      and any(page in self.pages for page in side.pages)
    )


class Regions:
  """The regions that are registered."""

  def __init__(self):
    self._lock = threading.Lock()
    self._segments: dict[str, Region] = {}
    self._pages: dict[str, list[Region]] = {}

  def add(self, region: Region) -> None:
    """Registers a region.

    Raises:
      ValueError: some of it is registered already.
    """
    with self._lock:
      same = self._pages.get(region.name, [])
      if region.pages is None:
        same = [r for r in (self._segments.get(region.name),) if r]
      for other in same:
        if region.overlaps(other):
          raise ValueError(f'{region} overlaps {other}, which is registered')
      if region.pages is None:
        self._segments[region.name] = region
      else:
        self._pages.setdefault(region.name, []).append(region)

  def remove(self, region: Region) -> None:
    """Unregisters a region.

    Raises:
      ValueError: it is not registered, as it is.
    """
    with self._lock:
      if region.pages is None and self._segments.get(region.name) == region:
        del self._segments[region.name]
      elif region in self._pages.get(region.name, ()):
        self._pages[region.name].remove(region)
      else:
        raise ValueError(f'{region} is not registered')

  def check(self, side: DevicePages | Replica) -> None:
    """Raises LookupError unless all of the side is registered."""
    if isinstance(side, Replica):
      if side.segment not in self._segments:
        raise LookupError(f'there is no segment {side.segment!r} registered')
      return
    regions = self._pages.get(side.instance)
    if not regions:
      raise LookupError(f'there is no instance {side.instance!r} registered')
    outside = [*side.pages]
    for region in regions:
      known = region.pages or range(0)
      outside = [page for page in outside if page not in known]
    if outside:
      raise LookupError(
        f'pages {outside} are not in registered memory of {side.instance!r}'
      )
