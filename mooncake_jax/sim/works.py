# SPDX-License-Identifier: Apache-2.0
"""What a prefill chunk and a transfer have in common on the virtual clock."""

from collections.abc import Sequence
import math

from mooncake_jax.backend import WorkId

UNKNOWN_S = math.inf


class SimWork:
  """A work under way.

  Attributes:
    after: works that it follows layer by layer and that were under way when
      it was started.
    num_open: how many of those have not ended.
    followers: works that follow this one.
    is_over: whether it only waits for the works it follows to end.
  """

  __slots__ = ('after', 'followers', 'is_over', 'num_open', 'work_id')

  def __init__(self, work_id: WorkId):
    self.work_id = work_id
    self.after: tuple[SimWork, ...] = ()
    self.num_open = 0
    self.followers: list[SimWork] = []
    self.is_over = False

  def layers_s(self) -> Sequence[float]:
    """When each layer is done, `UNKNOWN_S` where that is not settled yet."""
    raise NotImplementedError

  def range_s(self, start_layer: int, stop_layer: int) -> float:
    """When all layers of a range are done."""
    return max(self.layers_s()[start_layer:stop_layer], default=0.0)

  def ready_s(self, start_layer: int, stop_layer: int) -> float:
    """When all works it follows are done with a range of layers."""
    ready_s = 0.0
    for work in self.after:
      done_s = work.range_s(start_layer, stop_layer)
      if done_s > ready_s:
        ready_s = done_s
    return ready_s

  def needs_s(self, start_layer: int, stop_layer: int) -> list[float]:
    """The same, layer by layer."""
    each = [work.layers_s()[start_layer:stop_layer] for work in self.after]
    return [max(layer_s) for layer_s in zip(*each)]

  def let_go(self) -> None:
    """It has ended: what is around it is not kept for its sake."""
    self.after = ()
    self.followers = []
