# SPDX-License-Identifier: Apache-2.0
"""An instance whose mesh spans processes: one leads, the others follow.

Every process of a `jax.distributed` job must start the same programs in the
same order. What the deciders do depends on the wall clock, which no two
processes read alike, so they run in one process alone, the leader: right
before it starts a program on such a pool it tells the others which one and
with what from its memory, and they start it too (`Follower`). Host memory is
the leader's: blocks leave such a mesh whole and are told whole.

A CPU's devices share the threads of their process, and a program that waits
for another process holds some. So there programs of a process run one by one:
else two processes could each hold all theirs for what the other can't begin.
"""

from collections.abc import Callable
from collections.abc import Sequence
import threading
from typing import Any
from typing import Protocol
from typing import TypeVar

import jax
from jax.sharding import NamedSharding
import numpy as np

from mooncake_jax.engine.bound_step import Batch
from mooncake_jax.engine.mesh_model import MeshModel
from mooncake_jax.engine.stage_pool import ChunkInputs
from mooncake_jax.engine.stage_pool import StagePool
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.request import Sampling
from mooncake_jax.transfer import cpu_copies

T = TypeVar('T')
_INPUTS = jax.tree.structure(
  ChunkInputs(0, 0, 0, 0, SamplingRows.of([Sampling()]))
)


class Tell(Protocol):
  """Tells all followers what one pool is about to do; raises OSError."""

  def __call__(
    self, what: str, numbers: Sequence[int], arrays: Sequence[np.ndarray]
  ) -> None: ...


class SpanningPool(StagePool):
  """A pool on devices of several processes.

  Attributes:
    tell: of the leader; None where nobody is told: in a follower.
  """

  _turn = threading.Lock()  # of all pools of this process

  def __init__(self, *args: Any, **kwargs: Any):
    """As `StagePool`, in all processes alike."""
    super().__init__(*args, **kwargs)
    self.tell: Tell | None = None
    self._is_cpu = cpu_copies.on_cpu(self.kv)
    self.copies_now = self.can_copy_now = False  # it has a part of the heads
    self._gather_heads = jax.jit(lambda x: x, out_shardings=self._whole)

  def in_turn(
    self,
    run: Callable[[], T],
    what: str,
    numbers: Sequence[int] = (),
    arrays: Sequence[np.ndarray] = (),
  ) -> T:
    """See `StagePool`; tells it first."""
    if not self._is_cpu:
      self._tell(what, numbers, arrays)
      return run()
    with self._turn:
      self._tell(what, numbers, arrays)
      return jax.block_until_ready((run(), self.kv))[0]

  def put(self, tree: Any) -> Any:
    """Copies host arrays, of one content everywhere, to all devices."""
    leaves = [*map(np.asarray, jax.tree.leaves(tree))]
    if isinstance(tree, ChunkInputs | Batch):
      self._tell(type(tree).__name__, (), leaves)
    return jax.tree.map(lambda x: _on_mesh(np.asarray(x), self._whole), tree)

  def copy_out(
    self, pages: tuple[int, ...], start_layer: int, stop_layer: int
  ) -> jax.Array:
    """A block [L, 2, S, K, H] as in `StagePool`, whole on every device."""
    copy_out = super().copy_out
    return self.in_turn(
      lambda: self._gather_heads(copy_out(pages, start_layer, stop_layer)),
      'copy_out',
      (start_layer, stop_layer),
      (self._pages(pages),),
    )

  def copy_in(
    self, pages: tuple[int, ...], start_layer: int, block_L2SKH: Any
  ) -> jax.Array:
    """Writes a block of this process's memory; see `StagePool`."""
    block_L2SKH = np.asarray(block_L2SKH)
    sharding = self.block_sharding(block_L2SKH.shape)
    copy_in = super().copy_in
    return self.in_turn(
      lambda: copy_in(pages, start_layer, _on_mesh(block_L2SKH, sharding)),
      'copy_in',
      (start_layer,),
      (self._pages(pages), block_L2SKH),
    )

  def _tell(
    self, what: str, numbers: Sequence[int], arrays: Sequence[np.ndarray]
  ) -> None:
    if self.tell is not None:
      self.tell(what, numbers, arrays)


class Follower:
  """Does on its part of a mesh what the leader tells."""

  def __init__(self, pool: SpanningPool, model: MeshModel):
    """Takes a pool and parameters made as the leader made its own."""
    self._pool = pool
    self._model = model
    self._inputs: ChunkInputs | None = None
    self._x: jax.Array | None = None
    self._batch: Batch | None = None

  def do(
    self, what: str, numbers: Sequence[int], arrays: Sequence[np.ndarray]
  ) -> None:
    """Starts one program, or takes what the next ones need.

    Raises:
      ValueError: nothing is known by that name.
    """
    with jax.set_mesh(self._pool.mesh):
      match what:
        case 'ChunkInputs':
          self._x = None
          self._inputs = self._pool.put(jax.tree.unflatten(_INPUTS, arrays))
        case 'prefill':
          assert self._inputs is not None
          self._x = self._model.prefill(self._inputs, numbers[0], self._x)
        case 'Batch':
          self._batch = self._pool.put(Batch(*arrays))
        case 'step':
          assert self._batch is not None
          self._batch, _ = self._model.step(self._batch)
        case 'copy_out':
          self._pool.copy_out(_numbers(arrays[0]), *numbers)
        case 'copy_in':
          self._pool.copy_in(_numbers(arrays[0]), numbers[0], arrays[1])
        case _:
          raise ValueError(f'{what=} is nothing that a follower does')


def _numbers(array: np.ndarray) -> tuple[int, ...]:
  return tuple(array.tolist())


def _on_mesh(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """The array on this process's part of a mesh; asks no other process."""
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )
