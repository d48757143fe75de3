# SPDX-License-Identifier: Apache-2.0
"""What a backend that computes says of its devices."""

from typing import NamedTuple
from typing import Protocol
from typing import runtime_checkable


class DeviceName(NamedTuple):
  """A device as JAX names it: ('cpu', 'cpu:0'), and its platform.

  Attributes:
    attention: the kernel that 'auto' or the user chose for it.
    matmul_precision: JAX's default, of products with weights; None is the
      platform's fastest for float32: bfloat16 on TPUs, TF32 on GPUs.
  """

  platform: str
  name: str
  attention: str
  matmul_precision: str | None


@runtime_checkable
class OnDevices(Protocol):
  """A `Backend` that computes, in whatever processes."""

  def devices(self) -> list[DeviceName]:
    """All that it computes on; of a process after those of another."""
    ...
