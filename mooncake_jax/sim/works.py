# SPDX-License-Identifier: Apache-2.0
"""What a prefill chunk and a transfer have in common on the virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import math

from mooncake_jax.backend import WorkId

UNKNOWN_S = math.inf


@dataclass(eq=False)
class SimWork:
  """A work under way.

  Attributes:
    after: works that it follows layer by layer and that were under way when
      it was started.
    num_open: how many of those have not ended.
    followers: works that follow this one.
    is_over: whether it only waits for the works it follows to end.
  """

  work_id: WorkId
  after: tuple['SimWork', ...] = ()
  num_open: int = 0
  followers: list['SimWork'] = field(default_factory=list)
  is_over: bool = False

  def layers_s(self) -> Sequence[float]:
    """When each layer is done, `UNKNOWN_S` where that is not settled yet."""
    raise NotImplementedError

  def range_s(self, start_layer: int, stop_layer: int) -> float:
    """When all layers of a range are done."""
    return max(self.layers_s()[start_layer:stop_layer], default=0.0)

  def ready_s(self, start_layer: int, stop_layer: int) -> float:
    """When all works it follows are done with a range of layers."""
    return max(
      [work.range_s(start_layer, stop_layer) for work in self.after],
      default=0.0,
    )

  def needs_s(self, start_layer: int, stop_layer: int) -> list[float]:
    """The same, layer by layer."""
    each = [work.layers_s()[start_layer:stop_layer] for work in self.after]
    return [max(layer_s) for layer_s in zip(*each)]
