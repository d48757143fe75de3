# SPDX-License-Identifier: Apache-2.0
"""What a backend that computes says of its devices."""

from typing import NamedTuple
from typing import Protocol
from typing import runtime_checkable


class DeviceName(NamedTuple):
  """A device as JAX names it: ('cpu', 'cpu:0'), and its platform."""

  platform: str
  name: str


@runtime_checkable
class OnDevices(Protocol):
  """A `Backend` that computes, in whatever processes."""

  def devices(self) -> list[DeviceName]:
    """All that it computes on; of a process after those of another."""
    ...
